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
#include "register_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    __shared__ __align__(16) float weights[CHUNK][kTaps][BLOCK_FILTERS];
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
            Pixels(window).add_to(sum, weights[c]);
            window += kPlane;
        }
    }
    if (!active) return;
    tile.each(y, filter0, sum, [&](float *to, float v, int filter) { store(to, v, bias, filter); });
}
