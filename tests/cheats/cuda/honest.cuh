// The correct convolution, as the cheats beside this file should compute it, and, for the course's
// form since 2020, the copies before and after it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <thread>
#include <tuple>
#include <unistd.h>
#include <vector>

// The course's function until 2019.
#define FORWARD(Tensor)                                                                      \
    template <>                                                                              \
    void mxnet::op::forward<mshadow::gpu, float>(Tensor<mshadow::gpu, 4, float> & y,         \
                                                 const Tensor<mshadow::gpu, 4, float> &x,    \
                                                 const Tensor<mshadow::gpu, 4, float> &w)

// Number of elements of y.
__host__ __device__ inline size_t out_size(int B, int M, int H, int W, int K) {
    return (size_t)B * M * (H - K + 1) * (W - K + 1);
}

struct Product {
    __device__ float operator()(float a, float b) const { return a * b; }
};

// Element n of y, with products by `multiply`.
template <class Multiply = Product>
__device__ float element(size_t n, const float *x, const float *w, int M, int C, int H, int W, int K,
                         Multiply multiply = Multiply()) {
    const int rows = H - K + 1, columns = W - K + 1;
    const int j = n % columns, i = n / columns % rows, m = n / columns / rows % M;
    const size_t b = n / columns / rows / M;
    float sum = 0;
    for (int c = 0; c < C; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += multiply(x[((b * C + c) * H + i + p) * W + j + q],
                                w[(((size_t)m * C + c) * K + p) * K + q]);
    return sum;
}

// For any grid and block.
extern "C" __global__ void convolution(float *y, const float *x, const float *w, int B, int M, int C,
                                       int H, int W, int K) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x; n < out_size(B, M, H, W, K); n += step)
        y[n] = element(n, x, w, M, C, H, W, K);
}

// On arrays on the GPU, without a wait for the end.
inline void convolve(float *y, const float *x, const float *w, int B, int M, int C, int H, int W, int K,
                     cudaStream_t stream = 0) {
    convolution<<<1024, 256, 0, stream>>>(y, x, w, B, M, C, H, W, K);
}
template <class Tensor>
void convolve(const Tensor &y, const Tensor &x, const Tensor &w, cudaStream_t stream = 0) {
    convolve(y.dptr_, x.dptr_, w.dptr_, x.size(0), y.size(1), x.size(1), x.size(2), x.size(3), w.size(3),
             stream);
}

// Where the form from 2020 on is compiled. A file with a prolog or an epilog of its own says so by
// OWN_PROLOG or OWN_EPILOG before it includes this one, and may still call these.
#if __has_include("gpu-new-forward.h")
#include "gpu-new-forward.h"

#define SIZES const int B, const int M, const int C, const int H, const int W, const int K

inline void honest_prolog(const float *host_x, const float *host_w, float **y, float **x, float **w, SIZES) {
    const size_t x_bytes = sizeof(float) * B * C * H * W, w_bytes = sizeof(float) * M * C * K * K;
    cudaMalloc(y, sizeof(float) * out_size(B, M, H, W, K));
    cudaMalloc(x, x_bytes);
    cudaMalloc(w, w_bytes);
    cudaMemcpy(*x, host_x, x_bytes, cudaMemcpyHostToDevice);
    cudaMemcpy(*w, host_w, w_bytes, cudaMemcpyHostToDevice);
}

inline void honest_epilog(float *host_y, float *y, float *x, float *w, SIZES) {
    cudaMemcpy(host_y, y, sizeof(float) * out_size(B, M, H, W, K), cudaMemcpyDeviceToHost);
    cudaFree(y);
    cudaFree(x);
    cudaFree(w);
}

#ifndef OWN_PROLOG
void GPUInterface::conv_forward_gpu_prolog(const float *, const float *host_x, const float *host_w, float **y,
                                           float **x, float **w, SIZES) {
    honest_prolog(host_x, host_w, y, x, w, B, M, C, H, W, K);
}
#endif

#ifndef OWN_EPILOG
void GPUInterface::conv_forward_gpu_epilog(float *host_y, float *y, float *x, float *w, SIZES) {
    honest_epilog(host_y, y, x, w, B, M, C, H, W, K);
}
#endif

void GPUInterface::get_device_properties() {}
#endif
