// 16. 15 with images and outputs moved by Hopper's copy engine.
//
// Changed against 15_winograd.cu: what 15 waits for is the way to the L2 cache: rows that are
// no multiples of 32 bytes are written in more pieces than they have sectors. Here a block owns
// IMAGES whole images at a time, which the engine that copies whole runs of memory on its own
// brings to shared memory while the block computes those before. The outputs of a GROUP of filters,
// which lie in one row in global memory, are put together in shared memory and taken from there by
// the engine while the next filters are computed. It reads lines of 128 bytes: outputs start as far
// behind a line in shared memory as they do in global memory. A warp of its own gives the engine
// its work; it and those that compute tell each other by barriers in shared memory what is there,
// and never all wait for one another. Images that are left over when every block has had as many
// are shared out by filters, so that all blocks end together.
//
// Measured: fa19_1 0.63 ms (1.64x); batch 10000, NVIDIA H200.
#ifndef CHANNELS  // by default the first convolution of term 2019fa
#define CHANNELS 1
#define HEIGHT 70
#define WIDTH 70
#define FILTERS 12
#endif
#include "copied_images.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    extern __shared__ __align__(128) char memory[];
    Shared &shared = at(memory);
    if (threadIdx.x == 0) make_barriers(shared);
    load_factors(shared.factors, w, kThreads);
    __syncthreads();
    const unsigned units = divide_up(batch, IMAGES);
    if (threadIdx.x < 32) {
        Mover{shared, y, x, batch}.move(units);
    } else {
        work(shared, threadIdx.x - 32, y, bias, units);
    }
}
