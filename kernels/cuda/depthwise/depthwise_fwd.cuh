// Outputs of groups of one or few channels: y from x, or dx from dy.
//
// Blocks copy their input to shared memory (`gather`). With PLANES 0, each thread reads its pixels
// itself (`gather_directly`), which is faster with strides or small planes, where threads reuse
// little.
//
// In `gather`, narrow outputs, and outputs of threads with several columns, go through shared
// memory, too, so that each 32-byte sector of global memory is written once. Other outputs are
// stored directly: neighbouring threads of a row fill whole sectors.
#pragma once

#include "depthwise.cuh"

constexpr bool kCollected = kColumns > 1 || kOutW < 32;

template <class T>
__device__ __forceinline__ void put(T *to, float sum) {
    if (ACCUMULATE) sum += float(*to);
    ACTIVATE(sum);
    __stcs(to, T(sum));
}

__device__ __forceinline__ void stream(float *to, int i, float4 sums) {
    __stcs(reinterpret_cast<float4 *>(to) + i, sums);
}

#ifdef HALF
__device__ __forceinline__ void stream(__half *to, int i, float4 sums) {
    const uint2 rounded = make_uint2(halves_of(sums.x, sums.y), halves_of(sums.z, sums.w));
    __stcs(reinterpret_cast<uint2 *>(to) + i, rounded);
}
#endif

// Writes vector i.
template <class T>
__device__ __forceinline__ void put(T *to, int i, float4 sums) {
    if (ACCUMULATE) {
        float old[4];
        read_vector(old, to + 4 * i);
        sums.x += old[0], sums.y += old[1], sums.z += old[2], sums.w += old[3];
    }
    ACTIVATE(sums.x);
    ACTIVATE(sums.y);
    ACTIVATE(sums.z);
    ACTIVATE(sums.w);
    stream(to, i, sums);
}

// Writes a run that is in shared memory at the address of `placed`.
template <class T>
__device__ __forceinline__ void write_out(T *to, const float *from, int floats) {
    const Run run(to, floats);
    const float4 *sums = reinterpret_cast<const float4 *>(from + run.head);
#pragma unroll 4
    for (int i = threadIdx.x; i < run.body; i += THREADS) put(to + run.head, i, sums[i]);
    if (run.end() < run.count) put(to + run.end(), from[run.end()]);
}

// The weights of a group's outputs for one tap of one plane, loaded as one vector.
struct alignas(GROUP_OUT > 2 ? 16 : 4 * GROUP_OUT) Weights {
    float of[GROUP_OUT];
};

using Sums = float[GROUP_OUT][ROWS][kColumns];

// Each row of a kernel begins at a vector, which has several taps of one or two outputs.
constexpr int kRowPitch = GROUP_OUT > 2 ? KERNEL_W : divide_up(KERNEL_W, 4) * 4;
constexpr int kPlaneTaps = KERNEL_H * kRowPitch;
// Weights of many taps stay in shared memory, and the loop over a window's rows is not unrolled.
constexpr bool kManyTaps = kTaps > 49;
constexpr bool kSingle = GROUP_IN == 1 && GROUP_OUT == 1 && !kManyTaps;
constexpr int kSteps = GROUP_IN / HELD;
// Threads that divide the planes of an item.
constexpr int kShares = PLANES == 1 ? smaller(HELD, larger(1, THREADS / kPlaneItems)) : 1;

// The taps between one plane of a group and one of its outputs.
__device__ __forceinline__ const float *taps_of(const float *w, unsigned group, int in, int out) {
    const unsigned pair = BACKWARD ? (group * GROUP_IN + in) * GROUP_OUT + out
                                   : (group * GROUP_OUT + out) * GROUP_IN + in;
    return w + pair * kTaps;
}

// Copies the weights of a block's groups for planes `first` and later.
__device__ __forceinline__ void copy_weights(Weights (*to)[kPlaneTaps], const float *w,
                                             unsigned group0, int groups, int first) {
    constexpr int kOfPlane = kPlaneTaps * GROUP_OUT;
    for (int i = threadIdx.x; i < groups * HELD * kOfPlane; i += THREADS) {
        const unsigned group = (group0 + i / (HELD * kOfPlane)) % GROUPS;
        const int plane = i / kOfPlane, tap = i / GROUP_OUT % kPlaneTaps, out = i % GROUP_OUT;
        const int p = tap / kRowPitch, q = tap % kRowPitch;
        const float *taps = taps_of(w, group, first + plane % HELD, out);
        to[plane][tap].of[out] = q < KERNEL_W ? __ldg(taps + p * KERNEL_W + q) : 0;
    }
}

// Loads the weights of one plane and one output into registers.
__device__ __forceinline__ void load_weights(Weights (&to)[kPlaneTaps], const float *taps) {
#pragma unroll
    for (int tap = 0; tap < kTaps; tap++) {
        to[tap / KERNEL_W * kRowPitch + tap % KERNEL_W].of[0] = __ldg(taps + tap);
    }
}

// Adds the rows of a thread's window to its outputs; each row is read once.
template <class Pixels>
__device__ __forceinline__ void add_up(Sums &sums, const Pixels &window,
                                       const Weights *weights) {
#pragma unroll(kManyTaps ? 1 : kMost - kLeast + 1)
    for (int h = kLeast; h <= kMost; h++) {
        float pixels[kColumns][KERNEL_W];
        window.read(pixels, h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int p = Down::tap(r, h);
            if (p < 0) continue;
            const Weights *row = weights + p * kRowPitch;
#pragma unroll
            for (int q = 0; q < KERNEL_W; q++) {
#pragma unroll
                for (int c = 0; c < kColumns; c++) {
                    if (!Across::reads(c, q)) continue;
#pragma unroll
                    for (int o = 0; o < GROUP_OUT; o++) {
                        sums[o][r][c] += row[q].of[o] * pixels[c][q];
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ void clear(Sums &sums) {
#pragma unroll
    for (int o = 0; o < GROUP_OUT; o++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int c = 0; c < kColumns; c++) sums[o][r][c] = 0;
        }
    }
}

// Shared memory that collects a block's outputs, if they go through it.
using Collected = float4[kCollected ? kOutRuns : 1][kCollected ? vectors_for(kOutFloats) : 1];

// Writes a thread's outputs, or collects them.
__device__ __forceinline__ void epilogue(Y_TYPE *out, Collected &collected, const Sums &sums,
                                       const float (&start)[GROUP_OUT], const Band &band,
                                       const Item &item) {
#pragma unroll
    for (int o = 0; o < GROUP_OUT; o++) {
        Y_TYPE *to = out + o / kOutOfRun * kOutPlane;
        float *kept = placed(collected[kCollected ? o / kOutOfRun : 0], to);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
                if (!kEven && (item.row + r >= kOutH || item.column + c >= kOutW)) continue;
                const int plane = item.group * kOutOfRun + o % kOutOfRun;
                const int at = (plane * kOutH + item.row - band.row + r) * kOutW + item.column + c;
                if (kCollected) {
                    kept[at] = sums[o][r][c] + start[o];
                } else {
                    put(to + at, sums[o][r][c] + start[o]);
                }
            }
        }
    }
}

// Adds up the sums of all shares, in the first one.
__device__ __forceinline__ void add_shares(Sums &sums) {
    constexpr int kCount = GROUP_OUT * ROWS * kColumns;
    __shared__ float given[kCount][kPlaneItems];
    float *all = &sums[0][0][0];
    for (int share = 1; share < kShares; share++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            if (threadIdx.x / kPlaneItems == share) given[i][threadIdx.x % kPlaneItems] = all[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            if (threadIdx.x < kPlaneItems) all[i] += given[i][threadIdx.x];
        }
    }
}

// Computes a block's outputs; `groups` counts the groups of all images.
__device__ __forceinline__ void gather(Y_TYPE *out, const X_TYPE *in, const float *w,
                                       const float *bias, unsigned groups) {
    __shared__ Tile tiles[kInRuns];
    __shared__ Collected out_space;
    __shared__ __align__(16) Weights shared_weights[kSingle ? 1 : PLANES * HELD][kPlaneTaps];
    const unsigned group0 = blockIdx.x / kBands * PLANES;
    const int held = PLANES == 1 ? 1 : min(PLANES, groups - group0);
    const Band band(blockIdx.x % kBands);
    in += size_t(group0) * GROUP_IN * kInPlane + band.first * kInW;
    out += size_t(group0) * GROUP_OUT * kOutPlane + band.row * kOutW;

    Copy<kInFloats> copies[kInRuns];
    const auto load = [&] {
#pragma unroll
        for (int i = 0; i < kInRuns; i++) copies[i].load(in + i * kInPlane, band.in_floats(held));
    };
    load();
    // The loop over items repeats for one group only, so its weights stay the same.
    const unsigned mine = min(threadIdx.x / kPlaneItems, held - 1);
    const unsigned group = (group0 + mine) % GROUPS;
    Weights weights[kPlaneTaps];
    if constexpr (kSingle) load_weights(weights, w + group * kTaps);
    float start[GROUP_OUT];
#pragma unroll
    for (int o = 0; o < GROUP_OUT; o++) start[o] = BIAS ? __ldg(bias + group * GROUP_OUT + o) : 0;

    Sums sums;
    for (int step = 0; step < kSteps; step++) {
        if (step > 0) __syncthreads();
        if constexpr (!kSingle) copy_weights(shared_weights, w, group0, held, step * HELD);
#pragma unroll
        for (int i = 0; i < kInRuns; i++) tiles[i].store(copies[i]);
        __syncthreads();
        const X_TYPE *now = in;
        in += HELD * kInPlane;
        if (step + 1 < kSteps) load();
        for (int number = threadIdx.x; number < held * kPlaneItems * kShares; number += THREADS) {
            const Item item(number, band);
            if (step == 0) clear(sums);
#pragma unroll 1
            for (int i = kShares > 1 ? number / kPlaneItems : 0; i < HELD; i += kShares) {
                const Weights *of_plane = shared_weights[kSingle ? 0 : item.group * HELD + i];
                if constexpr (!kSingle && !kManyTaps) {
#pragma unroll
                    for (int tap = 0; tap < kPlaneTaps; tap++) {
#pragma unroll
                        for (int o = 0; o < GROUP_OUT; o++) {
                            weights[tap].of[o] = of_plane[tap].of[o];
                        }
                    }
                }
                const int run = i / kInOfRun, shift = misalignment(now + run * kInPlane);
                add_up(sums, Window(tiles[run], shift, band, item, i % kInOfRun),
                       kManyTaps ? of_plane : weights);
            }
            if (kShares == 1 && step + 1 == kSteps) {
                epilogue(out, out_space, sums, start, band, item);
            }
        }
    }
    if constexpr (kShares > 1) {
        add_shares(sums);
        if (threadIdx.x < kPlaneItems) {
            epilogue(out, out_space, sums, start, band, Item(threadIdx.x, band));
        }
    }
    if (kCollected) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOutRuns; i++) {
            Y_TYPE *to = out + i * kOutPlane;
            write_out(to, placed(out_space[i], to), band.out_floats(held));
        }
    }
}

// A thread's window of a plane in global memory.
struct PlaneWindow {
    const X_TYPE *pixels;
    int row, column;

    __device__ PlaneWindow(const X_TYPE *plane, int out_row, int out_column)
        : row(Down::begin(out_row)), column(Across::begin(out_column)) {
        pixels = plane + row * kInW + column;
    }

    // The interface of `Window`.
    __device__ __forceinline__ void read(float (&found)[kColumns][KERNEL_W], int h) const {
        const bool inside = kWithinRows || unsigned(row + h) < kInH;
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
#pragma unroll
            for (int q = 0; q < KERNEL_W; q++) {
                if (!Across::reads(c, q)) continue;
                const int offset = Across::offset(c, q);
                const bool always = offset >= 0 && kLastUnit + offset < kInW;
                const bool there = inside && (always || unsigned(column + offset) < kInW);
                found[c][q] = there ? float(__ldg(pixels + h * kInW + offset)) : 0;
            }
        }
    }
};

// Computes outputs without shared memory: pixels that several threads read are in the L1 cache for
// all but the first one. A block's threads may have outputs of different groups.
__device__ __forceinline__ void gather_directly(Y_TYPE *out, const X_TYPE *in, const float *w,
                                                const float *bias, unsigned groups) {
    const unsigned number = blockIdx.x * THREADS + threadIdx.x, plane = number / kPlaneItems;
    if (plane >= groups) return;
    const int row = number % kPlaneItems / kUnits * ROWS, column = number % kUnits * kColumns;
    const unsigned group = plane % GROUPS;
    Weights weights[kPlaneTaps];
    load_weights(weights, w + group * kTaps);
    const float start = BIAS ? __ldg(bias + group) : 0;
    Sums sums = {};
    add_up(sums, PlaneWindow(in + size_t(plane) * kInPlane, row, column), weights);
    out += size_t(plane) * kOutPlane + row * kOutW + column;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
            if (!kEven && (row + r >= kOutH || column + c >= kOutW)) continue;
            put(out + r * kOutW + c, sums[0][r][c] + start);
        }
    }
}

#if PLANES == 0
#define GATHER gather_directly
#else
#define GATHER gather
#endif
