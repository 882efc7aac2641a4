// 7. Reduction over input channels by a tree: SPLIT groups of threads of a block take every
//    SPLIT-th channel each, and their sums are added pairwise in shared memory.
//
// Changed against 6_register_tiles.cu: threads with the same threadIdx.x compute one register tile
// and divide its channels; more threads for small batches, at the price of the reduction.
//
// Measured: fa19_2 3.36 ms (0.81x); batch 10000, NVIDIA H200.
#include "output.cuh"
#include "shape.cuh"

#ifndef ROWS
#define ROWS 6
#endif
#ifndef BLOCK_FILTERS
#define BLOCK_FILTERS 8
#endif
#ifndef SPLIT
#define SPLIT 4  // a power of two
#endif
#ifndef THREADS
#define THREADS 32  // for each of the SPLIT parts
#endif
#ifndef BLOCKS
#define BLOCKS 4
#endif
#ifndef CHUNK
#define CHUNK 12  // channels whose weights are in shared memory at a time
#endif

constexpr int kStrips = divide_up(kOutH, ROWS);
constexpr int kFilterBlocks = divide_up(FILTERS, BLOCK_FILTERS);
constexpr int kTile = BLOCK_FILTERS * ROWS;

// Weights of a chunk of channels, the filters of a block side by side.
__device__ void load_weights(float (&weights)[CHUNK][kTaps][BLOCK_FILTERS], const float *w,
                             int filter0, int channel0) {
    const int thread = threadIdx.y * THREADS + threadIdx.x;
    for (int i = thread; i < CHUNK * kTaps * BLOCK_FILTERS; i += THREADS * SPLIT) {
        const int tap = i % kTaps, c = i / kTaps % CHUNK, m = i / kTaps / CHUNK;
        const bool inside = filter0 + m < FILTERS && channel0 + c < CHANNELS;
        const int source = ((filter0 + m) * CHANNELS + channel0 + c) * kTaps + tap;
        weights[c][tap][m] = inside ? w[source] : 0;
    }
}

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
        for (int c = threadIdx.y; c < CHUNK && channel0 + c < CHANNELS; c += SPLIT) {
            const float *plane = window + (channel0 + c) * kPlane;
            float pixels[ROWS + KERNEL_H - 1][KERNEL_W];
#pragma unroll
            for (int r = 0; r < ROWS + KERNEL_H - 1; r++) {
#pragma unroll
                for (int q = 0; q < KERNEL_W; q++) pixels[r][q] = __ldg(plane + r * WIDTH + q);
            }
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
    reduce(sum);
    if (!active || threadIdx.y > 0) return;
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
