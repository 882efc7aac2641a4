// 17. Half precision on Hopper's tensor cores, which read images straight from shared memory.
//
// Changed against 10_tf32.cu: four warps issue one wgmma instruction, 64 pixels by all filters of
// the block, which reads both factors from shared memory and runs asynchronously. An image is
// rounded to fp16 once, when it is loaded, and stored with channels last. Then a tap needs no
// gathering: its 64 pixels are contiguous, so another tap is another address (half_strips.cuh).
// Positions to the right of each row, at which no window starts, are computed and not stored: at
// most a seventh of the work. fp16 has TF32's 11 bits at twice its rate, and power-of-two scales
// make up for its small range: the relative error is near 3e-4 as with TF32, so this kernel needs
// the user's permission. Strides, padding and dilation change addresses only.
//
// Measured: fa19_1 1.06 ms, fa19_2 0.59 ms (1.78x); batch 10000, NVIDIA H200.
#define PARTS 1
#include "half_strips.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    convolve(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    convolve_strips(y, x, w, bias, batch, [](auto &sum, auto strip, auto weights) {
        hold(sum);
        begin_multiplying();
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            multiply(sum, strip + step_of_strip(step), weights + 2 * step * kColumns, step > 0);
        }
        multiply_now();
        hold(sum);
    });
}
