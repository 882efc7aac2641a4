// Sums, averages or the largest of rows: y[o, i] of x[o, :, i].
//
// A warp has a row, whose elements lie `inner` apart.
#ifndef LARGEST
#define LARGEST 0
#endif
#ifndef FACTOR
#define FACTOR 1.f  // that sums are multiplied by
#endif

extern "C" __global__ void __launch_bounds__(256)
    reduce_rows(float *y, const float *x, int rows, int length, int inner) {
    const unsigned row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float *from = x + size_t(row / inner) * length * inner + row % inner;
    float found = LARGEST ? -3.402823466e+38f : 0.f;
    for (unsigned i = lane; i < length; i += 32) {
        const float value = __ldg(from + size_t(i) * inner);
        found = LARGEST ? (value > found ? value : found) : found + value;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, found, step);
        found = LARGEST ? (other > found ? other : found) : found + other;
    }
    if (lane == 0) y[row] = LARGEST ? found : found * FACTOR;
}
