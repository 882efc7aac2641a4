// Sums, averages or the largest of rows: y[o, i] of x[o, :, i].
//
// A warp has a row, whose elements are `inner` apart.
#include "stored.cuh"

#ifndef LARGEST
#define LARGEST NONE  // or OF_ALL: NaN if any element is NaN; or OF_NUMBERS: ignores NaN
#define FACTOR 1.f  // that sums are multiplied by
#endif

#define NONE 0
#define OF_ALL 1
#define OF_NUMBERS 2

__device__ float combined(float a, float b) {
    if (LARGEST == OF_ALL) return a >= b || a != a ? a : b;
    if (LARGEST == OF_NUMBERS) return b > a ? b : a;
    return a + b;
}

extern "C" __global__ void __launch_bounds__(256)
    reduce_rows(float *__restrict__ y, const X_TYPE *__restrict__ x, int rows, int length,
                int inner) {
    const unsigned row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const X_TYPE *from = x + size_t(row / inner) * length * inner + row % inner;
    float found = LARGEST == OF_ALL ? -INFINITY : LARGEST == OF_NUMBERS ? -3.402823466e+38f : 0.f;
    for (unsigned i = lane; i < length; i += 32) {
        found = combined(found, float(__ldg(from + size_t(i) * inner)));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        found = combined(found, __shfl_xor_sync(0xffffffffu, found, step));
    }
    if (lane == 0) y[row] = LARGEST ? found : found * FACTOR;
}
