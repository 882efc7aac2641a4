// Replaces the header of this name in CUDA kernel files of the course from 2020 on.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include <cuda_runtime.h>

#ifdef ECE408_STRIDED
#define ECE408_STRIDE_PARAMETER , const int S
#else
#define ECE408_STRIDE_PARAMETER
#endif

// The header of some terms lacks this const.
#ifdef ECE408_PLAIN_OUTPUT
#define ECE408_HOST_OUTPUT float*
#else
#define ECE408_HOST_OUTPUT const float*
#endif

// Fall 2020 had conv_forward_gpu alone, which takes arrays on the host and copies them itself. The
// other methods are weak: their addresses are null unless the file defines them.
class GPUInterface {
public:
    void get_device_properties();
    [[gnu::weak]] void conv_forward_gpu_prolog(
        ECE408_HOST_OUTPUT host_output, const float* host_input, const float* host_mask,
        float** device_output_ptr, float** device_input_ptr, float** device_mask_ptr,
        const int Batch, const int Map_out, const int Channel, const int Height, const int Width,
        const int K ECE408_STRIDE_PARAMETER);
    void conv_forward_gpu(float* device_output, const float* device_input,
                          const float* device_mask, const int Batch, const int Map_out,
                          const int Channel, const int Height, const int Width,
                          const int K ECE408_STRIDE_PARAMETER);
    [[gnu::weak]] void conv_forward_gpu_epilog(float* host_output, float* device_output,
                                               float* device_input, float* device_mask,
                                               const int Batch, const int Map_out,
                                               const int Channel, const int Height, const int Width,
                                               const int K ECE408_STRIDE_PARAMETER);
};
