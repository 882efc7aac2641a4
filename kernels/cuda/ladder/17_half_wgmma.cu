// 17. Half precision on Hopper's tensor cores, which read images straight from shared memory.
//
// Changed against 10_tf32.cu: four warps issue one wgmma instruction, 64 pixels by all filters of
// the block, which reads both factors from shared memory and runs on its own. An image is rounded
// to half precision once, when it is loaded, and laid out with channels last. Then a tap needs no
// gathering: its 64 pixels follow each other, so another tap is another address (half_strips.cuh).
// What is computed to the right of each row, where no window starts, is not stored: at most a
// seventh of the work. Half precision has TF32's 11 bits, but goes through the unit at twice its
// rate, and powers of two make up for its few exponents: the relative error is near 3e-4 as with
// TF32, only for those who ask for it. Strides, padding and dilation are a matter of addresses.
//
// Measured: fa19_1 1.06 ms, fa19_2 0.59 ms (1.78x); batch 10000, NVIDIA H200.
#define PARTS 1
#include "half_strips.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    convolve_strips(y, x, w, bias, batch, [](auto &sum, auto strip, auto weights) {
        hold(sum);
        begin_multiplying();
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            multiply(sum, strip + step_of_strip(step), weights + 2 * step * kColumns, step > 0);
        }
        finish_multiplying();
        hold(sum);
    });
}
