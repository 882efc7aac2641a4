// Wrong: each block computes two images, and the last of an odd number has no block.
#include "honest.cuh"

__global__ void conv(float *y, const float *x, const float *w, SIZES) {
    const int image = out_size(1, M, H, W, K), n = blockIdx.x * 256 + threadIdx.x;
    if (n >= image) return;
    for (int b = 2 * blockIdx.y; b < min(B, 2 * (int)blockIdx.y + 2); b++)
        y[b * image + n] = element(b * image + n, x, w, M, C, H, W, K);
}

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    const dim3 grid((out_size(1, M, H, W, K) + 255) / 256, B > 1 ? B / 2 : 1);
    conv<<<grid, 256>>>(y, x, w, B, M, C, H, W, K);
}
