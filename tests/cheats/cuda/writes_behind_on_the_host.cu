// Copies its results to the caller, and some floats beyond them.
#define OWN_EPILOG
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    convolve(y, x, w, B, M, C, H, W, K);
}

void GPUInterface::conv_forward_gpu_epilog(float *host_y, float *y, float *x, float *w, SIZES) {
    const size_t size = out_size(B, M, H, W, K);
    for (size_t n = size; n < size + 16; n++) host_y[n] = 1;
    honest_epilog(host_y, y, x, w, B, M, C, H, W, K);
}
