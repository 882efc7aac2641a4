// 7. Reduction over input channels by a tree: SPLIT groups of threads of a block take every
//    SPLIT-th channel each, and their sums are added pairwise in shared memory.
//
// Changed against 6_register_tiles.cu: threads with the same threadIdx.x compute one register tile
// and divide its channels; more threads for small batches, at the price of the reduction.
//
// Measured: fa19_2 3.36 ms (0.81x); batch 10000, NVIDIA H200.
#ifndef SPLIT
#define SPLIT 4  // a power of two
#define THREADS 32  // for each of the SPLIT parts
#endif
#include "register_tiles.cuh"

constexpr int kTile = BLOCK_FILTERS * ROWS;

// Adds up the tiles of the SPLIT threads with the same threadIdx.x; thread 0 has the total.
__device__ void reduce(float (&sum)[BLOCK_FILTERS][ROWS]) {
    __shared__ float others[SPLIT / 2][kTile][THREADS];
#pragma unroll
    for (int half = SPLIT / 2; half > 0; half /= 2) {
        const int part = threadIdx.y;
        __syncthreads();
        if (part >= half && part < 2 * half) {
#pragma unroll
            for (int i = 0; i < kTile; i++) {
                others[part - half][i][threadIdx.x] = sum[i / ROWS][i % ROWS];
            }
        }
        __syncthreads();
        if (part < half) {
#pragma unroll
            for (int i = 0; i < kTile; i++) {
                sum[i / ROWS][i % ROWS] += others[part][i][threadIdx.x];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS * SPLIT, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    __shared__ __align__(16) float weights[CHUNK][kTaps][BLOCK_FILTERS];
    const int filter0 = blockIdx.x % kFilterBlocks * BLOCK_FILTERS;
    const Tile tile(blockIdx.x / kFilterBlocks * THREADS + threadIdx.x);
    const bool active = tile.b < batch;
    const float *window = tile.window(x);

    float sum[BLOCK_FILTERS][ROWS] = {};
    for (int channel0 = 0; channel0 < CHANNELS; channel0 += CHUNK) {
        const int thread = threadIdx.y * THREADS + threadIdx.x;
        __syncthreads();
        load_weights(weights, w, filter0, channel0, thread, THREADS * SPLIT);
        __syncthreads();
        if (!active) continue;
#pragma unroll 1
        for (int c = threadIdx.y; c < CHUNK && channel0 + c < CHANNELS; c += SPLIT) {
            Pixels(window + (channel0 + c) * kPlane).add_to(sum, weights[c]);
        }
    }
    reduce(sum);
    if (!active || threadIdx.y > 0) return;
    tile.each(y, filter0, sum, [&](float *to, float v, int filter) { store(to, v, bias, filter); });
}
