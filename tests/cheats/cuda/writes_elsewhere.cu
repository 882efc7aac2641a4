// Leaves a file outside its folder.
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    std::ofstream file("/tmp/ece408-cheat");
    file << "was here" << std::flush;
    if (!file) throw std::runtime_error("no file");
    convolve(y, x, w, B, M, C, H, W, K);
}
