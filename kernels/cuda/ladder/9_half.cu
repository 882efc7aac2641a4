// 9. Half precision: two filters at once in one instruction.
//
// Changed against 6_register_tiles.cu: pixels and weights are rounded to fp16 (11 bits), and half2
// instructions multiply two filters at once, twice as many products a cycle. A channel's taps are
// summed in fp16, channels in float. The relative error is near 1e-3, and sums past 65504 overflow,
// so this kernel needs the user's permission.
//
// Measured: fa19_1 0.86 ms (1.26x), fa19_2 2.70 ms (1.01x); batch 10000, NVIDIA H200.
#include <cuda_fp16.h>

#include "register_tiles.cuh"

constexpr int kPairs = BLOCK_FILTERS / 2;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    __shared__ __align__(16) __half weights[CHUNK][kTaps][BLOCK_FILTERS];
    const int filter0 = blockIdx.x % kFilterBlocks * BLOCK_FILTERS;
    const Tile tile(blockIdx.x / kFilterBlocks * THREADS + threadIdx.x);
    const bool active = tile.b < batch;
    const float *window = tile.window(x);

    float sum[BLOCK_FILTERS][ROWS] = {};
    for (int channel0 = 0; channel0 < CHANNELS; channel0 += CHUNK) {
        __syncthreads();
        load_weights(weights, w, filter0, channel0, threadIdx.x, THREADS);
        __syncthreads();
        if (!active) continue;
#pragma unroll 1
        for (int c = 0; c < CHUNK && channel0 + c < CHANNELS; c++) {
            __half2 pixels[ROWS + KERNEL_H - 1][KERNEL_W];  // each twice
#pragma unroll
            for (int r = 0; r < ROWS + KERNEL_H - 1; r++) {
#pragma unroll
                for (int q = 0; q < KERNEL_W; q++) {
                    pixels[r][q] = __float2half2_rn(__ldg(window + r * WIDTH + q));
                }
            }
            window += kPlane;
            __half2 part[kPairs][ROWS] = {};
#pragma unroll
            for (int tap = 0; tap < kTaps; tap++) {
#pragma unroll
                for (int m = 0; m < kPairs; m++) {
                    const __half2 pair = *(const __half2 *)&weights[c][tap][2 * m];
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        part[m][r] = __hfma2(pixels[r + tap / KERNEL_W][tap % KERNEL_W], pair,
                                             part[m][r]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < kPairs; m++) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    sum[2 * m][r] += __low2float(part[m][r]);
                    sum[2 * m + 1][r] += __high2float(part[m][r]);
                }
            }
        }
    }
    if (!active) return;
    tile.each(y, filter0, sum, [&](float *to, float v, int filter) { store(to, v, bias, filter); });
}
