// 19. 16 with registers handed over to the warps that compute.
//
// Changed against 16_copy_engine.cu: all warps of a block start with the same number of registers,
// and the copying warp has no use for them: the transformed pixels of six rows under a kernel of 7
// fit into twelve warps of 160 registers, but a thirteenth warp limits each to 128. Hopper moves
// registers between groups of four warps at run time: the first group keeps 24, one of its warps
// copies and the others end, and the computing warps get the rest. (PTX ISA: setmaxnreg.)
//
// Measured: fa19_1 0.63 ms (1.00x); batch 10000, NVIDIA H200.
#ifndef CHANNELS  // by default a layer with a kernel of 7
#define CHANNELS 1
#define HEIGHT 72
#define WIDTH 72
#define FILTERS 12
#define KERNEL_H 7
#define KERNEL_W 7
#endif
#ifndef REGISTERS
#define REGISTERS 160  // of a computing thread
#endif
#define WARPS 4
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
    if (threadIdx.x < 32 * WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 32) Mover{shared, y, x, batch}.move(units);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        work(shared, threadIdx.x - 32 * WARPS, y, bias, units);
    }
}
