// 8. Reduction over input channels by atomics: blocks take CHUNK channels each and add their sums
//    to y, which `prepare` has initialised.
//
// Changed against 7_channel_tree.cu: blocks, not threads of a block, divide the channels, and the
// memory system adds. The order of the additions, and with it the last bit of the result, varies
// from run to run.
//
// Measured: fa19_2 3.41 ms (0.98x); batch 10000, NVIDIA H200.
#ifndef CHUNK
#define CHUNK 4  // channels of a block
#endif
#include "register_tiles.cuh"

constexpr int kParts = divide_up(CHANNELS, CHUNK);

// Initialises y with the bias or zero, plus its old value if that is to be kept.
extern "C" __global__ void prepare(float *__restrict__ y, const float *__restrict__ bias,
                                   unsigned elements) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < elements) store(y + index, 0, bias, index / kOutPlane % FILTERS);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             int batch) {
    __shared__ __align__(16) float weights[CHUNK][kTaps][BLOCK_FILTERS];
    const int filter0 = blockIdx.x % kFilterBlocks * BLOCK_FILTERS;
    const int channel0 = blockIdx.x / kFilterBlocks % kParts * CHUNK;
    const Tile tile(blockIdx.x / kFilterBlocks / kParts * THREADS + threadIdx.x);
    const float *window = tile.window(x) + channel0 * kPlane;

    load_weights(weights, w, filter0, channel0, threadIdx.x, THREADS);
    __syncthreads();
    if (tile.b >= batch) return;
    float sum[BLOCK_FILTERS][ROWS] = {};
#pragma unroll 1
    for (int c = 0; c < CHUNK && channel0 + c < CHANNELS; c++) {
        Pixels(window).add_to(sum, weights[c]);
        window += kPlane;
    }
    tile.each(y, filter0, sum, [](float *to, float v, int) { atomicAdd(to, v); });
}
