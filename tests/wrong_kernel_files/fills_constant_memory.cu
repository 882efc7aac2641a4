// Wrong: constant memory has room for the weights of some layers only, and nobody looks for an error.
#include "honest.cuh"

#define ROOM 4096
__constant__ float mask[ROOM];

__global__ void conv(float *y, const float *x, const float *w, SIZES) {
    const int rows = H - K + 1, columns = W - K + 1, b = blockIdx.z, m = blockIdx.y;
    const int n = blockIdx.x * 256 + threadIdx.x, i = n / columns, j = n % columns;
    if (n >= rows * columns) return;
    float sum = 0;
    for (int c = 0; c < C; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += x[((b * C + c) * H + i + p) * W + j + q] *
                       mask[(((m * C + c) * K + p) * K + q) % ROOM];
    y[(b * M + m) * rows * columns + n] = sum;
}

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    cudaMemcpyToSymbol(mask, w, sizeof(float) * M * C * K * K, 0, cudaMemcpyDeviceToDevice);
    const dim3 grid(((H - K + 1) * (W - K + 1) + 255) / 256, M, B);
    conv<<<grid, 256>>>(y, x, w, B, M, C, H, W, K);
}
