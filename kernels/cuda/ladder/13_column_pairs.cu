// 13. One input channel, columns in pairs.
//
// Changed against 12_one_channel.cu: a thread owns two neighbouring columns. Their windows overlap,
// so it loads KERNEL_W + 1 pixels a row for both, as float2, and stores float2: fewer than half the
// accesses to memory. Weights are fetched while the pixels are in flight. Widths must be even, so
// that every float2 is aligned; in unaligned arrays, elements are read and written one by one.
//
// Measured: fa19_1 0.69 ms (1.18x); batch 10000, NVIDIA H200.
#ifndef CHANNELS  // by default the first convolution of term 2019fa
#define CHANNELS 1
#define HEIGHT 70
#define WIDTH 70
#define FILTERS 12
#endif
#ifndef ROWS
#define ROWS 3
#endif
#ifndef BLOCK_FILTERS
#define BLOCK_FILTERS 4
#endif
#include "float2.cuh"
#include "register_tiles.cuh"

constexpr int kPairs = kOutW / 2;                 // of columns
constexpr int kWindow = (KERNEL_W + 1) / 2 * 2;   // pixels of a row under two columns

static_assert(CHANNELS == 1, "this kernel is for one input channel");
static_assert(WIDTH % 2 == 0 && kOutW % 2 == 0, "pairs must be aligned");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    __shared__ __align__(16) float weights[kFilterBlocks][kTaps][BLOCK_FILTERS];
    const unsigned index = blockIdx.x * THREADS + threadIdx.x;
    const int j = index % kPairs * 2, strip = index / kPairs % kStrips;
    const unsigned b = index / kPairs / kStrips;
    const bool active = b < batch;
    // The last strip moves up to end with the image; its rows above `first` belong to the previous
    // one.
    const int first = strip * ROWS, i0 = min(first, kOutH - ROWS);

    const float *window = x + b * kImage + i0 * WIDTH + j;
    const bool read_pairs = aligned(x), write_pairs = aligned(y);
    float pixels[ROWS + KERNEL_H - 1][kWindow];
#pragma unroll
    for (int r = 0; r < ROWS + KERNEL_H - 1; r++) {
#pragma unroll
        for (int q = 0; q < kWindow; q += 2) {
            const float *from = window + r * WIDTH + q;
            const float2 pair = active ? load_pair(from, read_pairs) : float2();
            pixels[r][q] = pair.x;
            pixels[r][q + 1] = pair.y;
        }
    }
    // While the pixels are in flight.
    load_all_weights(weights, w);
    __syncthreads();
    if (!active) return;
    float *column = y + b * kOutImage + i0 * kOutW + j;
#pragma unroll 1
    for (int block = 0; block < kFilterBlocks; block++) {
        float2 sum[BLOCK_FILTERS][ROWS] = {};
#pragma unroll
        for (int tap = 0; tap < kTaps; tap++) {
#pragma unroll
            for (int m = 0; m < BLOCK_FILTERS; m++) {
                const float weight = weights[block][tap][m];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float *under = pixels[r + tap / KERNEL_W] + tap % KERNEL_W;
                    sum[m][r].x = fmaf(under[0], weight, sum[m][r].x);
                    sum[m][r].y = fmaf(under[1], weight, sum[m][r].y);
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
                    store_pair<true>(column + filter * kOutPlane + r * kOutW, sum[m][r], bias,
                                     filter, write_pairs);
                }
            }
        }
    }
}
