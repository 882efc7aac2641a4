// 1x1 convolutions of few channels, and of few filters their gradients for x, in plain float32
// arithmetic: sums of a few dozen products, for which memory is the limit. Tensor cores would need
// numbers in three parts there to be as exact (implicit_gemm_fused.cu).
//
// A block has all weights of its rows (filters, or channels of dx) in shared memory for as long as it
// runs, and takes one tile of pixels after the other. Their channels come to shared memory a slab at
// a time, two slabs ahead. A thread computes ROWS rows by PIXELS pixels. Lanes have neighbouring
// pixels: so a warp reads numbers side by side, and a weight once for all lanes.
//
// Measured: not yet.
#include <cuda_pipeline.h>

#define KERNEL_H 1
#define KERNEL_W 1
#include "output.cuh"
#include "shape.cuh"

#define FORWARD 0
#define DATA 1

// How blocks work: warps, each with rows of its own; rows of a thread, a multiple of 4, and its
// pixels; and blocks of a processor.
#ifndef WARPS
#define WARPS 4
#define ROWS 8
#define PIXELS 8
#define BLOCKS 4
#endif

constexpr int kIn = DIRECTION == DATA ? FILTERS : CHANNELS;
constexpr int kOut = DIRECTION == DATA ? CHANNELS : FILTERS;
constexpr int kOutPitch = DIRECTION == DATA ? kImage : kOutImage;  // between images
constexpr int kSlab = kIn < 16 ? divide_up(kIn, 4) * 4 : 16;  // channels at once
constexpr int kSlabs = divide_up(kIn, kSlab);
constexpr int kStages = 3;  // slabs in shared memory: one in use, two on their way
constexpr int kThreads = WARPS * 32, kBlockRows = WARPS * ROWS;
constexpr int kTile = 32 * PIXELS;
constexpr bool kWhole = kPlane % 4 == 0;  // four neighbours are of one image

struct Shared {
    // Threads that write neighbouring channels write to different banks, by four more.
    float weights[kSlabs * kSlab][kBlockRows + 4];
    float pixels[kStages][kSlab][kTile];
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// Weights of the rows from `first` on; zeros where there are none.
__device__ __forceinline__ void load_weights(Shared &shared, const float *w, int first) {
    for (int i = threadIdx.x; i < kSlabs * kSlab * kBlockRows; i += kThreads) {
        // Neighbouring threads read neighbours.
        const int row = DIRECTION == DATA ? i % kBlockRows : i / (kSlabs * kSlab);
        const int k = DIRECTION == DATA ? i / kBlockRows : i % (kSlabs * kSlab);
        const int at = DIRECTION == DATA ? k * kOut + first + row : (first + row) * kIn + k;
        shared.weights[k][row] = first + row < kOut && k < kIn ? w[at] : 0;
    }
}

// Where a position, of the pixels of all images, is in an array of images so far apart.
__device__ __forceinline__ size_t place_of(unsigned position, int pitch) {
    return size_t(position / kPlane) * pitch + position % kPlane;
}

// Begins to copy a slab of a tile's pixels, COUNT floats at a time.
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

// The slabs of a block's tiles, one after the other.
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

// Writes a tile, and begins the next one.
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
    multiply_pixels(float *y, const float *x, const float *w, const float *bias, int batch) {
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
        // Others' copies have arrived, and all are done with the stage that is filled next.
        __syncthreads();
        copy_ahead();
        multiply(sums, shared, stage, current.slab);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        if (current.last_of_tile()) write(sums, y, bias, first, current.tile * kTile, positions);
    }
}
