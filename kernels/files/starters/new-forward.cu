// A convolution on the GPU, in the course's form from 2020 on: right, and slow. Each thread computes
// one element of the output. Make it faster; `ece408 lab check` says whether it is still right.
//
// Arrays are float32 and contiguous: input[Batch][Channel][Height][Width], mask[Map_out][Channel][K][K],
// output[Batch][Map_out][Height-K+1][Width-K+1].
#include <cmath>
#include <iostream>

#include "gpu-new-forward.h"

#define THREADS 256

__global__ void conv_forward_kernel(float *output, const float *input, const float *mask, const int Map_out,
                                    const int Channel, const int Height, const int Width, const int K) {
    const int Height_out = Height - K + 1, Width_out = Width - K + 1;
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel >= Height_out * Width_out) return;
    const int b = blockIdx.z, m = blockIdx.y;
    const int h = pixel / Width_out, w = pixel % Width_out;

    float sum = 0;
    for (int c = 0; c < Channel; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += input[((b * Channel + c) * Height + h + p) * Width + w + q] *
                       mask[((m * Channel + c) * K + p) * K + q];
    output[(b * Map_out + m) * Height_out * Width_out + pixel] = sum;
}

// Bytes of the three arrays.
static size_t output_bytes(int Batch, int Map_out, int Height, int Width, int K) {
    return sizeof(float) * Batch * Map_out * (Height - K + 1) * (Width - K + 1);
}
static size_t input_bytes(int Batch, int Channel, int Height, int Width) {
    return sizeof(float) * Batch * Channel * Height * Width;
}
static size_t mask_bytes(int Map_out, int Channel, int K) {
    return sizeof(float) * Map_out * Channel * K * K;
}

// Allocate memory on the GPU, and copy the input and the mask there.
__host__ void GPUInterface::conv_forward_gpu_prolog(const float *host_output, const float *host_input,
                                                    const float *host_mask, float **device_output_ptr,
                                                    float **device_input_ptr, float **device_mask_ptr,
                                                    const int Batch, const int Map_out, const int Channel,
                                                    const int Height, const int Width, const int K) {
    const size_t input = input_bytes(Batch, Channel, Height, Width);
    const size_t mask = mask_bytes(Map_out, Channel, K);
    cudaMalloc(device_output_ptr, output_bytes(Batch, Map_out, Height, Width, K));
    cudaMalloc(device_input_ptr, input);
    cudaMalloc(device_mask_ptr, mask);
    cudaMemcpy(*device_input_ptr, host_input, input, cudaMemcpyHostToDevice);
    cudaMemcpy(*device_mask_ptr, host_mask, mask, cudaMemcpyHostToDevice);
}

// Launch the kernel.
__host__ void GPUInterface::conv_forward_gpu(float *device_output, const float *device_input,
                                             const float *device_mask, const int Batch, const int Map_out,
                                             const int Channel, const int Height, const int Width,
                                             const int K) {
    const int pixels = (Height - K + 1) * (Width - K + 1);
    const dim3 grid((pixels + THREADS - 1) / THREADS, Map_out, Batch);
    conv_forward_kernel<<<grid, THREADS>>>(device_output, device_input, device_mask, Map_out, Channel,
                                           Height, Width, K);
}

// Copy the output to the host, and free the memory on the GPU.
__host__ void GPUInterface::conv_forward_gpu_epilog(float *host_output, float *device_output,
                                                    float *device_input, float *device_mask,
                                                    const int Batch, const int Map_out, const int Channel,
                                                    const int Height, const int Width, const int K) {
    cudaMemcpy(host_output, device_output, output_bytes(Batch, Map_out, Height, Width, K),
               cudaMemcpyDeviceToHost);
    cudaFree(device_output);
    cudaFree(device_input);
    cudaFree(device_mask);
}

__host__ void GPUInterface::get_device_properties() {
    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    std::cout << properties.name << std::endl;
}
