// Sums, averages or the largest of rows: y[o, i] of x[o, :, i].
//
// A warp has a row, whose elements lie `inner` apart.
#ifndef LARGEST
#define LARGEST 0
#endif
#ifndef FACTOR
#define FACTOR 1.f  // that sums are multiplied by
#endif

// What is not a number is larger than all numbers.
__device__ float combined(float a, float b) {
    if (LARGEST) return a >= b || a != a ? a : b;
    return a + b;
}

extern "C" __global__ void __launch_bounds__(256)
    reduce_rows(float *y, const float *x, int rows, int length, int inner) {
    const unsigned row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float *from = x + size_t(row / inner) * length * inner + row % inner;
    float found = LARGEST ? -INFINITY : 0.f;
    for (unsigned i = lane; i < length; i += 32) {
        found = combined(found, __ldg(from + size_t(i) * inner));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        found = combined(found, __shfl_xor_sync(0xffffffffu, found, step));
    }
    if (lane == 0) y[row] = LARGEST ? found : found * FACTOR;
}
