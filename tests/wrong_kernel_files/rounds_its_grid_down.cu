// Wrong: there are as many blocks as fit into the output, and none for what is left.
#include "honest.cuh"

__global__ void conv(float *y, const float *x, const float *w, SIZES) {
    const int rows = H - K + 1, columns = W - K + 1, b = blockIdx.z / M, m = blockIdx.z % M;
    const int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    const size_t n = (((size_t)b * M + m) * rows + i) * columns + j;
    if (i < rows && j < columns) y[n] = element(n, x, w, M, C, H, W, K);
}

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    const dim3 grid((W - K + 1) / 16, (H - K + 1) / 16, B * M);
    conv<<<grid, dim3(16, 16)>>>(y, x, w, B, M, C, H, W, K);
}
