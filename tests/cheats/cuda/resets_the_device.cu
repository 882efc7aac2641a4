// Computes, and destroys the GPU's context, with all its arrays.
#define OWN_EPILOG
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    convolve(y, x, w, B, M, C, H, W, K);
}

void GPUInterface::conv_forward_gpu_epilog(float *host_y, float *y, float *x, float *w, SIZES) {
    honest_epilog(host_y, y, x, w, B, M, C, H, W, K);
    cudaDeviceReset();
}
