// 8. Reduction over input channels by atomics: blocks take CHUNK channels each and add their sums
//    to y, which `prepare` has initialised.
//
// Changed against 7_channel_tree.cu: blocks, not threads of a block, divide the channels, and the
// memory system adds. The order of the additions, and with it the last bit of the result, varies
// from run to run.
//
// Measured: fa19_2 3.41 ms (0.98x); batch 10000, NVIDIA H200.
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
#define CHUNK 4  // channels of a block
#endif

constexpr int kStrips = divide_up(kOutH, ROWS);
constexpr int kFilterBlocks = divide_up(FILTERS, BLOCK_FILTERS);
constexpr int kParts = divide_up(CHANNELS, CHUNK);

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

// Initialises y with the bias or zero, plus its old value if that is to be kept.
extern "C" __global__ void prepare(float *y, const float *bias, unsigned elements) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < elements) store(y + index, 0, bias, index / kOutPlane % FILTERS);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *y, const float *x, const float *w, int batch) {
    __shared__ __align__(16) float weights[CHUNK][kTaps][BLOCK_FILTERS];
    const int filter0 = blockIdx.x % kFilterBlocks * BLOCK_FILTERS;
    const int channel0 = blockIdx.x / kFilterBlocks % kParts * CHUNK;
    const unsigned index = blockIdx.x / kFilterBlocks / kParts * THREADS + threadIdx.x;
    const int j = index % kOutW, strip = index / kOutW % kStrips;
    const unsigned b = index / kOutW / kStrips;
    const bool active = b < batch;
    // The last strip moves up to end with the image; its rows above `first` belong to the previous
    // one.
    const int first = strip * ROWS, i0 = min(first, kOutH - ROWS);
    const float *window = x + b * kImage + channel0 * kPlane + i0 * WIDTH + j;

    load_weights(weights, w, filter0, channel0);
    __syncthreads();
    if (!active) return;
    float sum[BLOCK_FILTERS][ROWS] = {};
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
#pragma unroll
    for (int m = 0; m < BLOCK_FILTERS; m++) {
        if (FILTERS % BLOCK_FILTERS != 0 && filter0 + m >= FILTERS) break;
        float *column = y + b * kOutImage + (filter0 + m) * kOutPlane + i0 * kOutW + j;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (kOutH % ROWS == 0 || i0 + r >= first) {
                atomicAdd(column + r * kOutW, sum[m][r]);
            }
        }
    }
}
