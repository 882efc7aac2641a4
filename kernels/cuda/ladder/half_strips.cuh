// Images and weights in shared memory in fp16, channels last, in the layout that wgmma reads.
//
// A record is 16 bytes, 8 values of k for a pixel: 8 of its channels. A record of the last 4 or 2
// channels also holds those of the pixels under the next taps to the right. Records of neighbouring
// pixels are contiguous, so that 64 of them from any record on are a matrix operand, and a tap is a
// constant offset. The numbering of pixels includes the columns at the right in which no window
// starts; their results are not stored. With strides, pixels whose rows and columns have the same
// remainders are contiguous, for the same reason.
//
// fp16 has 11 bits, as TF32 has, but a small range: a power-of-two scale for each strip of an image
// and one for each filter bring the largest magnitude to 2^14, and are reversed at the end. With
// PARTS 2, a second fp16 number holds the rounding error of the first.
#pragma once

#include <stdint.h>

#include "split_fp16x2.cuh"
#include "output.cuh"
#include "shape.cuh"
#include "wgmma.cuh"

#ifndef GROUPS
#define GROUPS 2  // of four warps, in a block
#define FILTER_TILES 3  // tiles of 8 filters that a group computes at once, at most 4
#define FILTER_TURNS 1  // rounds over the filters of a block
#define STRIP_ROWS 29  // output rows whose input is in shared memory
#define BLOCKS 2
// 0: a thread reads its pixels twice; 1: it keeps them in registers; 2: it also prefetches those of
// the next strip.
#define HELD 2
#endif
// 1: results go through shared memory, to write fewer partial lines. It pays off where the kernel
// writes much and multiplies little.
#define STAGED (PARTS == 1 && FILTER_TILES > 2)

constexpr int kThreads = GROUPS * 128;
constexpr int kPaddedW = WIDTH + 2 * PAD_W;
// Rows of a strip's input, and their layout in memory by remainders of rows and columns.
constexpr int kStripH = (STRIP_ROWS - 1) * STRIDE_H + (KERNEL_H - 1) * DILATE_H + 1;
constexpr int kLaidH = divide_up(kStripH, STRIDE_H), kLaidW = divide_up(kPaddedW, STRIDE_W);
constexpr int kStrips = divide_up(kOutH, STRIP_ROWS);
constexpr int kStripPixels = kStripH * kPaddedW;
constexpr int kTurns = divide_up(kStripPixels, kThreads);  // pixels that a thread loads

// The last, partial group of channels, if small enough to share a record with further taps.
__host__ __device__ constexpr int partial_channels() {
    const int rest = CHANNELS % 8;
    int part = rest > 4 ? 8 : rest > 2 ? 4 : 2;
    while (8 / part > KERNEL_W) part *= 2;
    return rest == 0 || part == 8 ? 0 : part;
}

constexpr int kPart = partial_channels();
constexpr int kPartTaps = kPart ? 8 / kPart : 1;
constexpr int kPartUnits = divide_up(KERNEL_W, kPartTaps);  // for a row of taps
constexpr int kEights = kPart ? CHANNELS / 8 : divide_up(CHANNELS, 8);
constexpr int kPlanes = kEights + (kPart ? 1 : 0);
// Steps of k: two units, each of 8 values.
constexpr int kUnits = kEights * kTaps + (kPart ? KERNEL_H * kPartUnits : 0);
constexpr int kSteps = divide_up(kUnits, 2);
constexpr int kTiles = divide_up((STRIP_ROWS - 1) * kLaidW + kOutW, 64);
constexpr int kSums = FILTER_TILES * 4;  // of a thread, for a tile
constexpr int kColumns = PARTS * FILTER_TILES * 8;
constexpr int kFilters = FILTER_TURNS * FILTER_TILES * 8;  // of a block

// The record in a plane of a pixel of a strip, or the record offset of a tap.
__host__ __device__ constexpr int record_of(int row, int column) {
    return ((row % STRIDE_H * STRIDE_W + column % STRIDE_W) * kLaidH + row / STRIDE_H) * kLaidW +
           column / STRIDE_W;
}

constexpr int kLaid = kLaidH * kLaidW, kRemainders = STRIDE_H * STRIDE_W;
// Records after the last pixel, for the last tile's windows.
constexpr int kReadRecords = (kRemainders - 1) * kLaid + kTiles * 64 +
                             (KERNEL_H - 1) * DILATE_H / STRIDE_H * kLaidW +
                             (KERNEL_W - 1) * DILATE_W / STRIDE_W;
constexpr int kRecords = kRemainders * kLaid > kReadRecords ? kRemainders * kLaid : kReadRecords;

// One unit of k: a plane, a row of taps, its first tap. Taps before `fresh` belong to other units.
struct Unit {
    int plane, row, tap, fresh;

    __host__ __device__ constexpr int offset() const {
        return plane * PARTS * kRecords + record_of(row * DILATE_H, tap * DILATE_W);
    }
};

__host__ __device__ constexpr Unit counted_unit(int number) {
    if (number >= kUnits) return {0, 0, 0, KERNEL_W};  // padding of the last step
    if (number < kEights * kTaps) {
        const int tap = number % KERNEL_W;
        return {number / kTaps, number % kTaps / KERNEL_W, tap, tap};
    }
    number -= kEights * kTaps;
    const int fresh = number % kPartUnits * kPartTaps;
    // The last taps, moved left if fewer remain, so that nothing outside the window is multiplied.
    const int tap = fresh + kPartTaps > KERNEL_W ? KERNEL_W - kPartTaps : fresh;
    return {kEights, number / kPartUnits, tap, fresh};
}

// The units of a step in order of their addresses.
__host__ __device__ constexpr Unit unit_at(int number) {
    const Unit first = counted_unit(number / 2 * 2), second = counted_unit(number / 2 * 2 + 1);
    return (first.offset() <= second.offset()) == (number % 2 == 0) ? first : second;
}

struct Shared {
    uint4 strip[kPlanes][PARTS][kRecords];
    // In the order of the matrix's columns: the filters' first parts, then their second ones.
    uint4 weights[FILTER_TURNS][2 * kSteps][kColumns];
    float unscale[kFilters];
    float2 factors[kFilters];  // reverse the scales, the smaller factor first
    float largest[GROUPS * 4];
#if STAGED
    // A tile's results; the pitch puts filters 4 banks apart, so that a warp writes to 32 different
    // ones.
    float results[GROUPS][FILTER_TILES * 8][68];
#endif
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// Stores the scaled weights as records of the matrix.
__device__ void load_weights(Shared &shared, const float *w, int filter0) {
    constexpr int kCount = CHANNELS * kTaps, kTile = FILTER_TILES * 8;
    const int lane = threadIdx.x % 32;
    for (int m = threadIdx.x / 32; m < kFilters; m += kThreads / 32) {
        float most = 0;
#pragma unroll 8
        for (int i = lane; i < kCount; i += 32) {
            const float v = filter0 + m < FILTERS ? w[(filter0 + m) * kCount + i] : 0;
            most = larger(most, v, true);
        }
        most = largest_of_warp(most);
        if (lane == 0) shared.unscale[m] = inverse(scale_of(most));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * kSteps * kFilters; i += kThreads) {
        const int m = i % kFilters;
        const Unit unit = unit_at(i / kFilters);
        const int channels = unit.plane < kEights ? 8 : kPart;
        const float *from = w + (filter0 + m) * kCount + unit.row * KERNEL_W;
        const float scale = inverse(shared.unscale[m]);
        float values[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int c = unit.plane * 8 + k % channels, tap = unit.tap + k / channels;
            const bool inside = filter0 + m < FILTERS && c < CHANNELS && tap >= unit.fresh;
            values[k] = inside ? from[c * kTaps + tap] * scale : 0;
        }
        uint4 *to = &shared.weights[m / kTile][i / kFilters][m % kTile];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            to[part * kTile] = make_uint4(
                pair_of(values[0], values[1], part), pair_of(values[2], values[3], part),
                pair_of(values[4], values[5], part), pair_of(values[6], values[7], part));
        }
    }
}

// Reverses the scales, the smaller factor first: neither product overflows unless the result does.
__device__ __forceinline__ float unscaled(float sum, float2 factors) {
    return sum * factors.x * factors.y;
}

// A thread's part of a strip: one pixel in each turn, with all its channels.
struct Pixels {
    const X_TYPE *from;  // the image; the strip starts at
    int row0;

    __device__ Pixels(const X_TYPE *x, unsigned unit)
        : from(x + unit / kStrips * kImage), row0(unit % kStrips * STRIP_ROWS * STRIDE_H - PAD_H) {}

    __device__ __forceinline__ float read(int turn, int c) const {
        const int i = turn * kThreads + threadIdx.x;
        const int row = row0 + i / kPaddedW, column = i % kPaddedW - PAD_W;
        const bool inside = i < kStripPixels && c < CHANNELS && (unsigned)row < HEIGHT &&
                            (unsigned)column < WIDTH;
        return inside ? float(__ldg(from + c * kPlane + row * WIDTH + column)) : 0;
    }
};

// A thread's pixels, if they stay in registers during the search for the largest.
constexpr bool kHeld = HELD > 0, kAhead = HELD > 1;
using Held = float[kHeld ? kTurns : 1][kHeld ? CHANNELS : 1];

__device__ __forceinline__ void fetch(Held &held, const Pixels &pixels) {
    if constexpr (kHeld) {
#pragma unroll
        for (int turn = 0; turn < kTurns; turn++) {
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) held[turn][c] = pixels.read(turn, c);
        }
    }
}

__device__ __forceinline__ float fetched(const Held &held, const Pixels &pixels, int turn, int c) {
    if constexpr (kHeld) return c < CHANNELS ? held[turn][c] : 0;
    return pixels.read(turn, c);
}

// Writes a pixel's records.
__device__ __forceinline__ void lay_out_pixel(Shared &shared, const Held &held,
                                              const Pixels &pixels, int turn, float scale) {
    const int i = turn * kThreads + threadIdx.x;
    if (i >= kStripPixels) return;
    const int row = i / kPaddedW, column = i % kPaddedW;
    const auto pair = [&](int c, int part) {
        return pair_of(fetched(held, pixels, turn, c) * scale,
                       fetched(held, pixels, turn, c + 1) * scale, part);
    };
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int plane = 0; plane < kEights; plane++) {
            const int c = plane * 8;
            shared.strip[plane][part][record_of(row, column)] =
                make_uint4(pair(c, part), pair(c + 2, part), pair(c + 4, part), pair(c + 6, part));
        }
        if (kPart == 0) continue;
        const uint2 rest = make_uint2(pair(kEights * 8, part),
                                      kPart == 4 ? pair(kEights * 8 + 2, part) : 0);
#pragma unroll
        for (int tap = 0; tap < kPartTaps; tap++) {
            const int first = column - tap * DILATE_W;
            if (first < 0) break;
            uint4 *record = &shared.strip[kPlanes - 1][part][record_of(row, first)];
            if (kPart == 4) ((uint2 *)record)[tap] = rest;
            if (kPart == 2) ((uint32_t *)record)[tap] = rest.x;
        }
    }
}

// Reduces the largest magnitude of a strip; all threads get it.
__device__ __forceinline__ float largest_of_strip(Shared &shared, const Held &held,
                                                  const Pixels &pixels, bool finite) {
    float most = 0;
#pragma unroll(kHeld ? kTurns : 1)
    for (int turn = 0; turn < kTurns; turn++) {
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            most = larger(most, fetched(held, pixels, turn, c), finite);
        }
    }
    most = largest_of_warp(most);
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; warp++) most = fmaxf(most, shared.largest[warp]);
    return most;
}

// Stores a strip in the layout of wgmma, after all threads have read the previous one.
__device__ __forceinline__ void lay_out(Shared &shared, const Held &held, const Pixels &pixels) {
    float most = largest_of_strip(shared, held, pixels, false);
    if (isinf(most)) {
        __syncthreads();
        most = largest_of_strip(shared, held, pixels, true);
    }
    const float scale = scale_of(most), unscale = inverse(scale);
    for (int m = threadIdx.x; m < kFilters; m += kThreads) {
        const float other = shared.unscale[m];
        shared.factors[m] = make_float2(fminf(unscale, other), fmaxf(unscale, other));
    }
#pragma unroll(kHeld ? kTurns : 1)
    for (int turn = 0; turn < kTurns; turn++) lay_out_pixel(shared, held, pixels, turn, scale);
    // Tensor cores read through the async proxy.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

// The offset of a step's pixels and the distance of its units, to add to the descriptor of a tile's
// first record.
__device__ __forceinline__ constexpr uint64_t step_of_strip(int step) {
    const int first = unit_at(2 * step).offset();
    return first | uint64_t(unit_at(2 * step + 1).offset() - first) << 16;
}

#if STAGED
// Waits for the other warps of a group. Constant barrier numbers keep the compiler from reserving
// all barriers.
__device__ __forceinline__ void wait_for_group(int group) {
    static_assert(GROUPS <= 4);
    if (group == 0) asm volatile("bar.sync 1, 128;" ::: "memory");
    if (GROUPS > 1 && group == 1) asm volatile("bar.sync 2, 128;" ::: "memory");
    if (GROUPS > 2 && group == 2) asm volatile("bar.sync 3, 128;" ::: "memory");
    if (GROUPS > 3 && group == 3) asm volatile("bar.sync 4, 128;" ::: "memory");
}

// Writes a tile's sums through shared memory, a warp 32 pixels of a filter at once. `out` is the
// strip's first row in filter `m0` of the block.
__device__ __forceinline__ void store_tile(Y_TYPE *out, const float (&sum)[kSums], int tile, int m0,
                                           int filter0, int rows, int group, Shared &shared,
                                           const float *bias) {
    wait_for_group(group);
#pragma unroll
    for (int i = 0; i < kSums; i++) {
        const int m = threadIdx.x % 4 * 2 + i / 4 * 8 + i % 2;
        const int pixel = threadIdx.x / 32 % 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 32 / 4;
        shared.results[group][m][pixel] = unscaled(sum[i], shared.factors[m0 + m]);
    }
    wait_for_group(group);
    const int pixel = tile * 64 + threadIdx.x % 64, odd = threadIdx.x / 64 % 2;
    const int row = pixel / kLaidW, column = pixel % kLaidW;
    if (row >= rows || column >= kOutW) return;
    out += odd * int(kOutPlane) + row * kOutW + column;
#pragma unroll
    for (int m = 0; m < FILTER_TILES * 8; m += 2) {
        const int filter = filter0 + m0 + m + odd;
        if (FILTERS % kFilters != 0 && filter >= FILTERS) break;
        store(out + m * int(kOutPlane), shared.results[group][m + odd][pixel % 64], bias, filter);
    }
}

#else
// Writes a tile's sums from registers, a warp 8 pixels of 4 filters at once.
__device__ __forceinline__ void store_tile(Y_TYPE *out, const float (&sum)[kSums], int tile, int m0,
                                           int filter0, int rows, int, Shared &shared,
                                           const float *bias) {
    const int lane = threadIdx.x % 32, first = lane % 4 * 2;
    float2 factors[kSums / 2];
#pragma unroll
    for (int i = 0; i < kSums / 2; i++) factors[i] = shared.factors[m0 + first + i / 2 * 8 + i % 2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int pixel = tile * 64 + threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
        const int row = pixel / kLaidW, column = pixel % kLaidW;
        if (row >= rows || column >= kOutW) continue;
        Y_TYPE *to = out + (first * int(kOutPlane) + row * kOutW + column);
#pragma unroll
        for (int i = 0; i < kSums / 2; i++) {
            const int m = i / 2 * 8 + i % 2, filter = filter0 + m0 + first + m;
            if (FILTERS % kFilters != 0 && filter >= FILTERS) break;
            const float v = unscaled(sum[i / 2 * 4 + half * 2 + i % 2], factors[i]);
            store(to + m * int(kOutPlane), v, bias, filter);
        }
    }
}
#endif

// Loops over every gridDim.x-th strip of the batch. `multiply_tile` gets the sums, the descriptor
// of a tile's first record, and that of the weights of FILTER_TILES tiles of filters.
template <class MultiplyTile>
__device__ __forceinline__ void convolve_strips(Y_TYPE *y, const X_TYPE *x, const float *w,
                                                const float *bias, int batch,
                                                MultiplyTile multiply_tile) {
    extern __shared__ __align__(128) char memory[];
    Shared &shared = *(Shared *)memory;
    const int filter0 = blockIdx.y * kFilters;
    const unsigned units = batch * kStrips;  // an image's strips are the units of work
    // The shuffle tells the compiler that it is uniform in a warp.
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

    Held held;
    if (kAhead && blockIdx.x < units) fetch(held, Pixels(x, blockIdx.x));
    load_weights(shared, w, filter0);
    for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
        if (!kAhead) fetch(held, Pixels(x, unit));
        lay_out(shared, held, Pixels(x, unit));
        if (kAhead && unit + gridDim.x < units) fetch(held, Pixels(x, unit + gridDim.x));
        const int row0 = unit % kStrips * STRIP_ROWS, rows = min(STRIP_ROWS, kOutH - row0);
        const int tiles = divide_up((rows - 1) * kLaidW + kOutW, 64);
        Y_TYPE *out = y + unit / kStrips * kOutImage + filter0 * kOutPlane + row0 * kOutW;
        for (int i = group; i < tiles * FILTER_TURNS; i += GROUPS) {
            const int tile = i / FILTER_TURNS, turn = i % FILTER_TURNS;
            const int m0 = turn * FILTER_TILES * 8;
            float sum[kSums] = {};
            multiply_tile(sum, describe(&shared.strip[0][0][tile * 64], 0),
                          describe(shared.weights[turn], kColumns));
            store_tile(out + m0 * kOutPlane, sum, tile, m0, filter0, rows, group, shared, bias);
        }
    }
}
