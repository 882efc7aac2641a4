// 9. Half precision: two filters at once in one instruction.
//
// Changed against 6_register_tiles.cu: pixels and weights are rounded to fp16 (11 bits), and half2
// instructions multiply two filters at once, twice as many products a cycle. A channel's taps are
// summed in fp16, channels in float. The relative error is near 1e-3, and sums past 65504 overflow,
// so this kernel needs the user's permission.
//
// Measured: fa19_1 0.86 ms (1.26x), fa19_2 2.70 ms (1.01x); batch 10000, NVIDIA H200.
#include <cuda_fp16.h>

#include "output.cuh"
#include "shape.cuh"

#ifndef ROWS
#define ROWS 6
#endif
#ifndef BLOCK_FILTERS
#define BLOCK_FILTERS 8  // even
#endif
#ifndef THREADS
#define THREADS 128
#endif
#ifndef BLOCKS
#define BLOCKS 4
#endif
#ifndef CHUNK
#define CHUNK 12  // channels whose weights are in shared memory at a time
#endif

constexpr int kStrips = divide_up(kOutH, ROWS);
constexpr int kFilterBlocks = divide_up(FILTERS, BLOCK_FILTERS);
constexpr int kPairs = BLOCK_FILTERS / 2;

// Weights of a chunk of channels, the filters of a block side by side.
__device__ void load_weights(__half (&weights)[CHUNK][kTaps][BLOCK_FILTERS], const float *w,
                             int filter0, int channel0) {
    for (int i = threadIdx.x; i < CHUNK * kTaps * BLOCK_FILTERS; i += THREADS) {
        const int tap = i % kTaps, c = i / kTaps % CHUNK, m = i / kTaps / CHUNK;
        const bool inside = filter0 + m < FILTERS && channel0 + c < CHANNELS;
        const int source = ((filter0 + m) * CHANNELS + channel0 + c) * kTaps + tap;
        weights[c][tap][m] = __float2half_rn(inside ? w[source] : 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    __shared__ __align__(16) __half weights[CHUNK][kTaps][BLOCK_FILTERS];
    const int filter0 = blockIdx.x % kFilterBlocks * BLOCK_FILTERS;
    const unsigned index = blockIdx.x / kFilterBlocks * THREADS + threadIdx.x;
    const int j = index % kOutW, strip = index / kOutW % kStrips;
    const unsigned b = index / kOutW / kStrips;
    const bool active = b < batch;
    // The last strip moves up to end with the image; its rows above `first` belong to the previous
    // one.
    const int first = strip * ROWS, i0 = min(first, kOutH - ROWS);
    const float *window = x + b * kImage + i0 * WIDTH + j;

    float sum[BLOCK_FILTERS][ROWS] = {};
    for (int channel0 = 0; channel0 < CHANNELS; channel0 += CHUNK) {
        __syncthreads();
        load_weights(weights, w, filter0, channel0);
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
#pragma unroll
    for (int m = 0; m < BLOCK_FILTERS; m++) {
        if (FILTERS % BLOCK_FILTERS != 0 && filter0 + m >= FILTERS) break;
        float *column = y + b * kOutImage + (filter0 + m) * kOutPlane + i0 * kOutW + j;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (kOutH % ROWS == 0 || i0 + r >= first) {
                store(column + r * kOutW, sum[m][r], bias, filter0 + m);
            }
        }
    }
}
