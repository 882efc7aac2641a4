// Wrong: a block has a thread for each pixel of the output, and blocks have 1024 at most.
#include "honest.cuh"

__global__ void conv(float *y, const float *x, const float *w, SIZES) {
    const size_t n = ((size_t)blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    y[n] = element(n, x, w, M, C, H, W, K);
}

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    conv<<<B * M, dim3(W - K + 1, H - K + 1)>>>(y, x, w, B, M, C, H, W, K);
}
