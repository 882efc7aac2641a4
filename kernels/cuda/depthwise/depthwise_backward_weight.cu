// The gradient for w of groups of one or few channels: dw from x and dy.
//
// A block has one group, or several with small planes, and some of the images. It copies rows of x
// and dy to shared memory, with the next rows in flight, and each thread keeps a sum for each tap
// of all filters in registers. The threads' sums are added up at the end, in a fixed order; where
// several blocks divide a group's images, `reduce` adds up their sums.
//
// Measured: no, it is not on the ladder.
#include "depthwise.cuh"
#include "weight_sum.cuh"

constexpr unsigned kWeights = GROUPS * GROUP_OUT * GROUP_IN * kTaps;
constexpr int kBlocks = divide_up(GROUPS, PLANES);
// Threads of a plane of x; whole warps where a block has one group.
constexpr int kPlaneThreads = PLANES == 1 ? THREADS / GROUP_IN : kPlaneItems;
static_assert(HELD == GROUP_IN, "windows of a group's planes are there at once");
static_assert(PLANES > 1 || THREADS % (32 * GROUP_IN) == 0, "whole warps");
static_assert(PLANES * GROUP_IN * kPlaneThreads <= THREADS, "a thread has one plane");

using Sums = float[GROUP_OUT][KERNEL_H][KERNEL_W];

// The index of the first weight between two planes of a group.
__device__ __forceinline__ unsigned first_weight(unsigned group, int in, int out) {
    return ((group * GROUP_OUT + out) * GROUP_IN + in) * kTaps;
}

// Writes a sum; recomputes it if it is not finite.
__device__ __forceinline__ void put(float *dw, float sum, const float *x, const float *dy,
                                    int batch, int weight) {
    if (!isfinite(sum)) {
        const int filter = weight / kTaps / GROUP_IN;
        const int channel = filter / GROUP_OUT * GROUP_IN + weight / kTaps % GROUP_IN;
        sum = weight_sum<float, kInH, kInW, kOutH, kOutW>(
            x + channel * kInPlane, size_t(GROUPS * GROUP_IN) * kInPlane, dy + filter * kOutPlane,
            size_t(GROUPS * GROUP_OUT) * kOutPlane, batch, weight % kTaps);
    }
    if (ACCUMULATE) sum += dw[weight];
    dw[weight] = sum;
}

// The first rows of a block in both arrays, for one image.
struct Unit {
    Band band;
    size_t group;  // counted over all images

    __device__ Unit(unsigned number, unsigned group0)
        : band(number % kBands), group(size_t(number / kBands) * GROUPS + group0) {}

    __device__ const float *in(const float *x, int run) const {
        return x + (group * GROUP_IN + run) * kInPlane + band.first * kInW;
    }

    __device__ const float *out(const float *dy, int run) const {
        return dy + (group * GROUP_OUT + run) * kOutPlane + band.row * kOutW;
    }
};

// Adds a thread's outputs of one filter to each tap's sum. Rows beyond the last output are skipped,
// not multiplied by zero: the pixels under their windows may be infinite.
__device__ __forceinline__ void add_up(Sums &sums, const Window &window,
                                       const float (&gradients)[GROUP_OUT][ROWS],
                                       const Item &item) {
#pragma unroll
    for (int h = kLeast; h <= kMost; h++) {
        float pixels[kColumns][KERNEL_W];
        window.read(pixels, h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!kEven && item.row + r >= kOutH) continue;
#pragma unroll
            for (int p = 0; p < KERNEL_H; p++) {
                if (Down::offset(r, p) != h) continue;
#pragma unroll
                for (int o = 0; o < GROUP_OUT; o++) {
#pragma unroll
                    for (int q = 0; q < KERNEL_W; q++) {
                        sums[o][p][q] += gradients[o][r] * pixels[0][q];
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ float sum_of_warp(float sum) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    return sum;
}

// Calls f(plane, filter of the group, tap, sum) with the sums over all threads of the plane.
template <class F>
__device__ __forceinline__ void reduce_one_group(const Sums &sums, F f) {
    constexpr int kWarps = THREADS / 32, kPlaneWarps = kWarps / GROUP_IN;
    __shared__ float of_warps[GROUP_OUT * kTaps][kWarps];
#pragma unroll
    for (int i = 0; i < GROUP_OUT * kTaps; i++) {
        const int tap = i % kTaps;
        const float sum = sum_of_warp(sums[i / kTaps][tap / KERNEL_W][tap % KERNEL_W]);
        if (threadIdx.x % 32 == 0) of_warps[i][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP_IN * GROUP_OUT * kTaps; i += THREADS) {
        const int plane = i / (GROUP_OUT * kTaps), of_plane = i % (GROUP_OUT * kTaps);
        float sum = 0;
        for (int warp = 0; warp < kPlaneWarps; warp++) {
            sum += of_warps[of_plane][plane * kPlaneWarps + warp];
        }
        f(plane, of_plane / kTaps, of_plane % kTaps, sum);
    }
}

template <class F>
__device__ __forceinline__ void reduce_groups(const Sums &sums, int groups, F f) {
    __shared__ float of_threads[KERNEL_W][THREADS];
#pragma unroll
    for (int row = 0; row < GROUP_OUT * KERNEL_H; row++) {
        const int o = row / KERNEL_H, p = row % KERNEL_H;
        __syncthreads();
#pragma unroll
        for (int q = 0; q < KERNEL_W; q++) of_threads[q][threadIdx.x] = sums[o][p][q];
        __syncthreads();
        for (int i = threadIdx.x; i < groups * GROUP_IN * KERNEL_W; i += THREADS) {
            const int plane = i / KERNEL_W, q = i % KERNEL_W;
            float sum = 0;
#pragma unroll 4
            for (int item = 0; item < kPlaneItems; item++) {
                sum += of_threads[q][plane * kPlaneItems + item];
            }
            f(plane, o, p * KERNEL_W + q, sum);
        }
    }
}

// Units are bands of an image; each slice has `each` of them. One slice writes dw; several slices
// write parts[slice][weight].
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_weight(float *__restrict__ dw, float *__restrict__ parts, const float *__restrict__ x,
                    const float *__restrict__ dy, int batch, int slices, int each) {
    __shared__ Tile x_tiles[kInRuns];
    __shared__ float4 dy_space[kOutRuns][vectors_for(kOutFloats)];
    const unsigned group0 = blockIdx.x % kBlocks * PLANES, slice = blockIdx.x / kBlocks;
    const int held = PLANES == 1 ? 1 : min(PLANES, int(GROUPS - group0));
    const unsigned begin = slice * each, end = min(begin + each, unsigned(batch) * kBands);
    const int plane = threadIdx.x / kPlaneThreads, in = plane % GROUP_IN;
    const int first = plane / GROUP_IN * kPlaneItems;

    Sums sums = {};
    Copy<kInFloats> x_copies[kInRuns];
    Copy<kOutFloats> dy_copies[kOutRuns];
    const auto load = [&](unsigned number) {
        const Unit unit(number, group0);
#pragma unroll
        for (int i = 0; i < kInRuns; i++) {
            x_copies[i].load(unit.in(x, i), unit.band.in_floats(held));
        }
#pragma unroll
        for (int i = 0; i < kOutRuns; i++) {
            dy_copies[i].load(unit.out(dy, i), unit.band.out_floats(held));
        }
    };
    load(begin);
    for (unsigned number = begin; number < end; number++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kInRuns; i++) x_tiles[i].store(x_copies[i]);
#pragma unroll
        for (int i = 0; i < kOutRuns; i++) dy_copies[i].store(dy_space[i]);
        __syncthreads();
        if (number + 1 < end) load(number + 1);
        const Unit unit(number, group0);
        const int run = in / kInOfRun, shift = misalignment(unit.in(x, run));
        if (plane >= held * GROUP_IN) continue;
        for (int i = threadIdx.x % kPlaneThreads; i < kPlaneItems; i += kPlaneThreads) {
            const Item item(first + i, unit.band);
            float gradients[GROUP_OUT][ROWS];
#pragma unroll
            for (int o = 0; o < GROUP_OUT; o++) {
                const float *rows = placed(dy_space[o / kOutOfRun], unit.out(dy, o / kOutOfRun));
                const int above = (item.group * kOutOfRun + o % kOutOfRun) * kOutH;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const int row = above + item.row - unit.band.row + r;
                    const bool there = kEven || item.row + r < kOutH;
                    gradients[o][r] = there ? rows[row * kOutW + item.column] : 0;
                }
            }
            const Window window(x_tiles[run], shift, unit.band, item, in % kInOfRun);
            add_up(sums, window, gradients, item);
        }
    }

    const auto write_sum = [=](int plane, int out, int tap, float sum) {
        const unsigned group = group0 + plane / GROUP_IN;
        const unsigned weight = first_weight(group, plane % GROUP_IN, out) + tap;
        if (slices == 1) {
            put(dw, sum, x, dy, batch, weight);
        } else {
            parts[slice * size_t(kWeights) + weight] = sum;
        }
    };
    if constexpr (PLANES == 1) {
        reduce_one_group(sums, write_sum);
    } else {
        reduce_groups(sums, held, write_sum);
    }
}

extern "C" __global__ void reduce(float *__restrict__ dw, const float *__restrict__ parts,
                                  const float *__restrict__ x, const float *__restrict__ dy,
                                  int batch, int slices) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= kWeights) return;
    double sum = 0;
#pragma unroll 8
    for (int slice = 0; slice < slices; slice++) sum += parts[slice * size_t(kWeights) + index];
    put(dw, float(sum), x, dy, batch, index);
}
