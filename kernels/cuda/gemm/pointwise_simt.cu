// 1x1 convolutions of few channels, and gradients for x of few filters, in float32 arithmetic
// without tensor cores. Sums have a few dozen products, so memory bandwidth is the limit; tensor
// cores would need a three-part split to be as exact (implicit_gemm_fused.cu).
//
// A persistent block keeps all weights of its rows (filters, or channels of dx) in shared memory,
// and loops over tiles of pixels. Their channels are copied to shared memory slab by slab, two
// slabs ahead. A thread computes ROWS rows by PIXELS pixels. Lanes have neighbouring pixels: loads
// of pixels coalesce, and a weight is one broadcast for all lanes.
//
// Measured: not yet.
#include <cuda_pipeline.h>

#define KERNEL_H 1
#define KERNEL_W 1
#include "output.cuh"
#include "shape.cuh"

#define FORWARD 0
#define DATA 1

// Tiling: warps, each with its own rows; rows of a thread, a multiple of 4; pixels of a thread;
// blocks of a multiprocessor.
#ifndef WARPS
#define WARPS 4
#define ROWS 8
#define PIXELS 8
#define BLOCKS 4
#endif

constexpr int kIn = DIRECTION == DATA ? FILTERS : CHANNELS;
constexpr int kOut = DIRECTION == DATA ? CHANNELS : FILTERS;
constexpr int kOutPitch = DIRECTION == DATA ? kImage : kOutImage;  // elements between images
constexpr int kSlab = kIn < 16 ? divide_up(kIn, 4) * 4 : 16;  // channels at once
constexpr int kSlabs = divide_up(kIn, kSlab);
constexpr int kStages = 3;  // slabs in shared memory: one in use, two in flight
constexpr int kThreads = WARPS * 32, kBlockRows = WARPS * ROWS;
constexpr int kTile = 32 * PIXELS;
constexpr bool kWhole = kPlane % 4 == 0;  // four neighbours are in one image

struct Shared {
    // The pitch puts neighbouring channels into different banks.
    float weights[kSlabs * kSlab][kBlockRows + 4];
    float pixels[kStages][kSlab][kTile];
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// Copies the weights of rows `first` and later, and zeros beyond the last row.
__device__ __forceinline__ void load_weights(Shared &shared, const float *w, int first) {
    for (int i = threadIdx.x; i < kSlabs * kSlab * kBlockRows; i += kThreads) {
        // Neighbouring threads read neighbouring addresses.
        const int row = DIRECTION == DATA ? i % kBlockRows : i / (kSlabs * kSlab);
        const int k = DIRECTION == DATA ? i / kBlockRows : i % (kSlabs * kSlab);
        const int at = DIRECTION == DATA ? k * kOut + first + row : (first + row) * kIn + k;
        shared.weights[k][row] = first + row < kOut && k < kIn ? w[at] : 0;
    }
}

// The offset of a position, counted over all images, in an array whose images are `pitch` apart.
__device__ __forceinline__ size_t place_of(unsigned position, int pitch) {
    return size_t(position / kPlane) * pitch + position % kPlane;
}

// Starts to copy a slab of a tile's pixels, COUNT floats at a time.
template <int COUNT>
__device__ __forceinline__ void begin_copies(float (&to)[kSlab][kTile], const float *x, int channel,
                                             unsigned position, unsigned positions) {
    constexpr int kRuns = kTile / COUNT;
    for (int i = threadIdx.x; i < kSlab * kRuns; i += kThreads) {
        const int k = i / kRuns, at = i % kRuns * COUNT;
        const bool there = channel + k < kIn && position + at < positions;
        const float *from = x;
        if (there) from += place_of(position + at, kIn * kPlane) + (channel + k) * kPlane;
        __pipeline_memcpy_async(&to[k][at], from, 4 * COUNT, there ? 0 : 4 * COUNT);
    }
}

// Iterates over the slabs of a block's tiles.
struct Slabs {
    unsigned tile, step, tiles;
    int slab = 0;

    __device__ __forceinline__ Slabs(unsigned first, unsigned step, unsigned tiles)
        : tile(first), step(step), tiles(tiles) {}
    __device__ __forceinline__ bool there() const { return tile < tiles; }
    __device__ __forceinline__ bool last_of_tile() const { return slab == kSlabs - 1; }
    __device__ __forceinline__ void advance() {
        if (++slab == kSlabs) slab = 0, tile += step;
    }
};

using Sums = float[ROWS][PIXELS];

__device__ __forceinline__ void multiply(Sums &sums, const Shared &shared, int stage, int slab) {
    const int row = threadIdx.x / 32 * ROWS, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kSlab; k++) {
        float weights[ROWS], pixels[PIXELS];
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            *(float4 *)&weights[i] = *(const float4 *)&shared.weights[slab * kSlab + k][row + i];
        }
#pragma unroll
        for (int j = 0; j < PIXELS; j++) pixels[j] = shared.pixels[stage][k][lane + 32 * j];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int j = 0; j < PIXELS; j++) sums[i][j] += weights[i] * pixels[j];
        }
    }
}

// Writes a tile, then clears the sums.
__device__ __forceinline__ void write(Sums &sums, float *y, const float *bias, int first,
                                      unsigned position, unsigned positions) {
    first += threadIdx.x / 32 * ROWS;
#pragma unroll
    for (int j = 0; j < PIXELS; j++) {
        const unsigned at = position + threadIdx.x % 32 + 32 * j;
        if (at < positions) {
            float *to = y + place_of(at, kOutPitch) + size_t(first) * kPlane;
            float before[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                before[i] = first + i < kOut ? held(to + i * kPlane) : 0;
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if (first + i < kOut) {
                    store(to + i * kPlane, sums[i][j], bias, first + i, before[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) sums[i][j] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    multiply_pixels(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
                    const float *__restrict__ bias, int batch) {
    extern __shared__ __align__(16) char bytes[];
    Shared &shared = *(Shared *)bytes;
    const unsigned positions = unsigned(batch) * kPlane;
    const int first = blockIdx.y * kBlockRows;
    const Slabs begin(blockIdx.x, gridDim.x, divide_up(positions, kTile));
    const bool whole = kWhole && size_t(x) % 16 == 0;

    Slabs ahead = begin;
    int to = 0;
    auto copy_ahead = [&] {
        if (ahead.there()) {
            if (whole) {
                begin_copies<4>(shared.pixels[to], x, ahead.slab * kSlab, ahead.tile * kTile, positions);
            } else {
                begin_copies<1>(shared.pixels[to], x, ahead.slab * kSlab, ahead.tile * kTile, positions);
            }
            ahead.advance();
        }
        __pipeline_commit();
        to = to + 1 == kStages ? 0 : to + 1;
    };
    for (int i = 0; i < kStages - 1; i++) copy_ahead();
    load_weights(shared, w, first);

    Sums sums{};
    int stage = 0;
    for (Slabs current = begin; current.there(); current.advance()) {
        __pipeline_wait_prior(kStages - 2);
        // All copies of this stage have arrived, and all threads have read the stage that is filled
        // next.
        __syncthreads();
        copy_ahead();
        multiply(sums, shared, stage, current.slab);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        if (current.last_of_tile()) write(sums, y, bias, first, current.tile * kTile, positions);
    }
}
