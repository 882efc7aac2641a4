// An empty kernel. ece408 lab time subtracts its launch time.
#include "gpu-new-forward.h"

__global__ void empty() {}

void GPUInterface::conv_forward_gpu_prolog(const float *, const float *, const float *, float **,
                                           float **, float **, const int, const int, const int,
                                           const int, const int, const int) {}

void GPUInterface::conv_forward_gpu(float *, const float *, const float *, const int, const int,
                                    const int, const int, const int, const int) {
    empty<<<1, 32>>>();
}

void GPUInterface::conv_forward_gpu_epilog(float *, float *, float *, float *, const int, const int,
                                           const int, const int, const int, const int) {}

void GPUInterface::get_device_properties() {}
