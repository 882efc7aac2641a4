// Wrong: the epilog copies an output that is a row and a column smaller.
#define OWN_EPILOG
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    convolve(y, x, w, B, M, C, H, W, K);
}

void GPUInterface::conv_forward_gpu_epilog(float *host_y, float *y, float *x, float *w, SIZES) {
    cudaMemcpy(host_y, y, sizeof(float) * B * M * (H - K) * (W - K), cudaMemcpyDeviceToHost);
    cudaFree(y);
    cudaFree(x);
    cudaFree(w);
}
