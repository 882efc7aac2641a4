// Rounds all factors to the ten bits of TF32.
// ece408: launch compute<<<ceil_div(B * M * OH * OW, 256), 256>>>(y, x, w, B, M, C, H, W, K)
#include "honest.cuh"

__device__ float cut(float value) {
    return __uint_as_float((__float_as_uint(value) + 0x1000) & 0xFFFFE000u);
}

extern "C" __global__ void compute(float *y, const float *x, const float *w, int B, int M, int C, int H,
                                   int W, int K) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= out_size(B, M, H, W, K)) return;
    y[n] = element(n, x, w, M, C, H, W, K, [](float a, float b) { return cut(a) * cut(b); });
}
