// Opens a connection to another machine.
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    if (socket(AF_INET, SOCK_STREAM, 0) < 0) throw std::runtime_error("no socket");
    convolve(y, x, w, B, M, C, H, W, K);
}
