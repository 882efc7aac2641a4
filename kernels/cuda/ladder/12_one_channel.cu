// 12. One input channel: the pixels under a column stay in registers for all filters.
//
// Changed against 6_register_tiles.cu: with one channel there is no sum over channels, so a thread
// loads its (ROWS + KERNEL_H - 1) x KERNEL_W pixels once, and the loop goes over the filters,
// BLOCK_FILTERS at a time; all weights are in shared memory. Every pixel is read from memory once,
// and the register tile is small, so more threads fit.
//
// Measured: fa19_1 0.81 ms (1.33x); batch 10000, NVIDIA H200.
#ifndef CHANNELS  // by default the first convolution of term 2019fa
#define CHANNELS 1
#define HEIGHT 70
#define WIDTH 70
#define FILTERS 12
#endif
#ifndef BLOCK_FILTERS
#define BLOCK_FILTERS 4
#endif
#include "register_tiles.cuh"

static_assert(CHANNELS == 1, "this kernel is for one input channel");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    __shared__ __align__(16) float weights[kFilterBlocks][kTaps][BLOCK_FILTERS];
    load_all_weights(weights, w);
    __syncthreads();
    const unsigned index = blockIdx.x * THREADS + threadIdx.x;
    const int j = index % kOutW, strip = index / kOutW % kStrips;
    const unsigned b = index / kOutW / kStrips;
    if (b >= batch) return;
    // The last strip moves up to end with the image; its rows above `first` belong to the previous
    // one.
    const int first = strip * ROWS, i0 = min(first, kOutH - ROWS);

    const float *window = x + b * kImage + i0 * WIDTH + j;
    float pixels[ROWS + KERNEL_H - 1][KERNEL_W];
#pragma unroll
    for (int r = 0; r < ROWS + KERNEL_H - 1; r++) {
#pragma unroll
        for (int q = 0; q < KERNEL_W; q++) pixels[r][q] = __ldg(window + r * WIDTH + q);
    }
    float *column = y + b * kOutImage + i0 * kOutW + j;
#pragma unroll 1
    for (int block = 0; block < kFilterBlocks; block++) {
        float sum[BLOCK_FILTERS][ROWS] = {};
#pragma unroll
        for (int tap = 0; tap < kTaps; tap++) {
#pragma unroll
            for (int m = 0; m < BLOCK_FILTERS; m++) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    sum[m][r] = fmaf(pixels[r + tap / KERNEL_W][tap % KERNEL_W],
                                     weights[block][tap][m], sum[m][r]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < BLOCK_FILTERS; m++) {
            const int filter = block * BLOCK_FILTERS + m;
            if (FILTERS % BLOCK_FILTERS != 0 && filter >= FILTERS) break;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (kOutH % ROWS == 0 || i0 + r >= first) {
                    store(column + filter * kOutPlane + r * kOutW, sum[m][r], bias, filter);
                }
            }
        }
    }
}
