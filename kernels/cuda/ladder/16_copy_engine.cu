// 16. 15 with images and outputs moved by Hopper's copy engine (TMA).
//
// Changed against 15_winograd.cu: 15 waits for the path to the L2 cache, as rows that are no
// multiple of 32 bytes take more writes than they have sectors. Here a block owns IMAGES whole
// images at a time; the engine copies them to shared memory while the block computes the previous
// ones. The outputs of a GROUP of filters, which are contiguous in global memory, are collected in
// shared memory and copied out by the engine while the next filters are computed. It reads lines of
// 128 bytes, so outputs have the same offset in a line in shared memory as in global memory. One
// warp issues the copies; it and the computing warps signal each other by barriers in shared
// memory, and never all wait for one another. Images that are left after an equal number for every
// block are divided by filters, so that all blocks end together.
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
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
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
