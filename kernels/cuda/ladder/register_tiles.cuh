// What 6_register_tiles.cu to 9_half.cu, 12_one_channel.cu and 13_column_pairs.cu have in common: a
// thread computes ROWS rows of one output column for BLOCK_FILTERS filters, whose weights are in
// shared memory.
#pragma once

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

// The tile of a thread, whose number among all that compute the same filters is `index`.
struct Tile {
    int j, first, i0;
    unsigned b;

    __device__ explicit Tile(unsigned index)
        : j(index % kOutW),
          first(index / kOutW % kStrips * ROWS),
          // The last strip moves up to end with the image; its rows above `first` belong to the
          // previous one.
          i0(min(first, kOutH - ROWS)),
          b(index / kOutW / kStrips) {}

    __device__ const float *window(const float *x) const {
        return x + b * kImage + i0 * WIDTH + j;
    }

    // Calls write(element, sum, filter) for each element of y in the tile.
    template <class Write>
    __device__ void each(float *y, int filter0, const float (&sum)[BLOCK_FILTERS][ROWS],
                         Write write) const {
#pragma unroll
        for (int m = 0; m < BLOCK_FILTERS; m++) {
            if (FILTERS % BLOCK_FILTERS != 0 && filter0 + m >= FILTERS) break;
            float *column = y + b * kOutImage + (filter0 + m) * kOutPlane + i0 * kOutW + j;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (kOutH % ROWS == 0 || i0 + r >= first) {
                    write(column + r * kOutW, sum[m][r], filter0 + m);
                }
            }
        }
    }
};

// Weights of a chunk of channels, the filters of a block side by side, loaded by `threads` threads.
template <class Element>
__device__ void load_weights(Element (&weights)[CHUNK][kTaps][BLOCK_FILTERS], const float *w,
                             int filter0, int channel0, int thread, int threads) {
    for (int i = thread; i < CHUNK * kTaps * BLOCK_FILTERS; i += threads) {
        const int tap = i % kTaps, c = i / kTaps % CHUNK, m = i / kTaps / CHUNK;
        const bool inside = filter0 + m < FILTERS && channel0 + c < CHANNELS;
        const int source = ((filter0 + m) * CHANNELS + channel0 + c) * kTaps + tap;
        weights[c][tap][m] = inside ? w[source] : 0;
    }
}

// All weights of one channel, the filters of a block side by side.
__device__ void load_all_weights(float (&weights)[kFilterBlocks][kTaps][BLOCK_FILTERS],
                                 const float *w) {
    for (int i = threadIdx.x; i < kFilterBlocks * BLOCK_FILTERS * kTaps; i += THREADS) {
        const int m = i / kTaps, tap = i % kTaps;
        weights[m / BLOCK_FILTERS][tap][m % BLOCK_FILTERS] = m < FILTERS ? w[i] : 0;
    }
}

// The pixels at `window`, which a tile needs of one channel.
struct Pixels {
    float at[ROWS + KERNEL_H - 1][KERNEL_W];

    __device__ __forceinline__ explicit Pixels(const float *window) {
#pragma unroll
        for (int r = 0; r < ROWS + KERNEL_H - 1; r++) {
#pragma unroll
            for (int q = 0; q < KERNEL_W; q++) at[r][q] = __ldg(window + r * WIDTH + q);
        }
    }

    // Adds their products with weights.
    __device__ __forceinline__ void add_to(float (&sum)[BLOCK_FILTERS][ROWS],
                                           const float (&weights)[kTaps][BLOCK_FILTERS]) const {
#pragma unroll
        for (int tap = 0; tap < kTaps; tap++) {
#pragma unroll
            for (int m = 0; m < BLOCK_FILTERS; m++) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    sum[m][r] = fmaf(at[r + tap / KERNEL_W][tap % KERNEL_W], weights[tap][m],
                                     sum[m][r]);
                }
            }
        }
    }
};
