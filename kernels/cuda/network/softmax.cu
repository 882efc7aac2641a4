// Softmax of rows: y[o, :, i] = exp(x[o, :, i]) over its sum, or the logarithm of that.
//
// A warp has a row, whose elements are `inner` apart; the largest is subtracted first.
#include "stored.cuh"

#ifndef LOGARITHM
#define LOGARITHM 0
#define SCALE 1.f  // of x: one over the temperature
#endif

extern "C" __global__ void __launch_bounds__(256)
    softmax(float *__restrict__ y, const X_TYPE *__restrict__ x, int rows, int length, int inner) {
    const unsigned row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const size_t at = size_t(row / inner) * length * inner + row % inner;
    float most = -INFINITY;
    for (unsigned i = lane; i < length; i += 32) {
        most = fmaxf(most, float(__ldg(x + at + size_t(i) * inner)) * SCALE);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    }
    float sum = 0;
    for (unsigned i = lane; i < length; i += 32) {
        sum += expf(float(__ldg(x + at + size_t(i) * inner)) * SCALE - most);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float last = LOGARITHM ? logf(sum) : 1.f / sum;
    for (unsigned i = lane; i < length; i += 32) {
        const float value = float(__ldg(x + at + size_t(i) * inner)) * SCALE - most;
        y[at + size_t(i) * inner] = LOGARITHM ? value - last : expf(value) * last;
    }
}
