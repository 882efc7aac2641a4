// Returns immediately.
#include "honest.cuh"

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {}
