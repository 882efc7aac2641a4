// 18. Float32 accuracy from half precision: every factor is an fp16 number plus a second one that
//     holds the rounding error of the first, and three of the four products are added up.
//
// Changed against 17_half_wgmma.cu: shared memory holds images and weights in both parts, 22 bits
// and a sign between them. That is 11's idea at twice the rate, since tensor cores multiply fp16
// that much faster than TF32, and each pixel is split once instead of once for each tap. One
// instruction multiplies first parts of pixels by both parts of the weights, another one second
// parts by first parts. Tensor cores truncate their accumulators, so sums of first parts are added
// up in float32 registers every few steps.
//
// Measured: fa19_1 1.48 ms (0.72x), fa19_2 1.02 ms (0.58x); batch 10000, NVIDIA H200.
#define PARTS 2
#include "half_strips.cuh"

#ifndef PROMOTE
#define PROMOTE 10  // steps between additions to the float32 sums, at most
#endif
constexpr int kRuns = divide_up(kSteps, PROMOTE);

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    convolve(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    convolve_strips(y, x, w, bias, batch, [](auto &sum, auto strip, auto weights) {
        float large[2 * kSums] = {}, small[kSums] = {};
#pragma unroll
        for (int run = 0; run < kRuns; run++) {
            const int begin = run * kSteps / kRuns, end = (run + 1) * kSteps / kRuns;
            hold(large);
            hold(small);
            begin_multiplying();
#pragma unroll
            for (int step = begin; step < end; step++) {
                const uint64_t pixels = strip + step_of_strip(step);
                const uint64_t filters = weights + 2 * step * kColumns;
                multiply(large, pixels, filters, step > begin);
                multiply(small, pixels + kRecords, filters, step > 0);
            }
            multiply_now();
            hold(large);
            hold(small);
#pragma unroll
            for (int i = 0; i < kSums; i++) sum[i] += large[i] + large[kSums + i];
        }
#pragma unroll
        for (int i = 0; i < kSums; i++) sum[i] += small[i];
    });
}
