// 6. Register tiling with compile-time shapes: a thread computes ROWS rows of one output column
//    for BLOCK_FILTERS filters at once.
//
// Changed against 5_implicit_gemm.cu: a direct convolution again, whose operands now stay in
// registers. A thread loads the (ROWS + KERNEL_H - 1) x KERNEL_W pixels under its column once per
// channel and uses each for up to KERNEL_H rows and BLOCK_FILTERS filters; a weight, read from
// shared memory as part of a vector, is used for ROWS rows. With a constant shape, every loop over
// taps unrolls, every index is a constant and every division a multiplication.
//
// Measured: fa19_1 1.08 ms (7.82x), fa19_2 2.72 ms (8.56x); batch 10000, NVIDIA H200.
#include "output.cuh"
#include "shape.cuh"

#ifndef ROWS
#define ROWS 6
#endif
#ifndef BLOCK_FILTERS
#define BLOCK_FILTERS 8
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

// Weights of a chunk of channels, the filters of a block side by side.
__device__ void load_weights(float (&weights)[CHUNK][kTaps][BLOCK_FILTERS], const float *w,
                             int filter0, int channel0) {
    for (int i = threadIdx.x; i < CHUNK * kTaps * BLOCK_FILTERS; i += THREADS) {
        const int tap = i % kTaps, c = i / kTaps % CHUNK, m = i / kTaps / CHUNK;
        const bool inside = filter0 + m < FILTERS && channel0 + c < CHANNELS;
        const int source = ((filter0 + m) * CHANNELS + channel0 + c) * kTaps + tap;
        weights[c][tap][m] = inside ? w[source] : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    __shared__ __align__(16) float weights[CHUNK][kTaps][BLOCK_FILTERS];
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
            float pixels[ROWS + KERNEL_H - 1][KERNEL_W];
#pragma unroll
            for (int r = 0; r < ROWS + KERNEL_H - 1; r++) {
#pragma unroll
                for (int q = 0; q < KERNEL_W; q++) pixels[r][q] = __ldg(window + r * WIDTH + q);
            }
            window += kPlane;
#pragma unroll
            for (int tap = 0; tap < kTaps; tap++) {
#pragma unroll
                for (int m = 0; m < BLOCK_FILTERS; m++) {
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        sum[m][r] = fmaf(pixels[r + tap / KERNEL_W][tap % KERNEL_W],
                                         weights[c][tap][m], sum[m][r]);
                    }
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
