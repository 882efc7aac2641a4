// Wrong: it adds up in y, which begins with whatever the memory held.
#include "honest.cuh"

__global__ void conv(float *y, const float *x, const float *w, SIZES) {
    const int rows = H - K + 1, columns = W - K + 1, b = blockIdx.z, m = blockIdx.y;
    const int n = blockIdx.x * 256 + threadIdx.x, i = n / columns, j = n % columns;
    if (n >= rows * columns) return;
    for (int c = 0; c < C; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                y[(b * M + m) * rows * columns + n] +=
                    x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
}

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    const dim3 grid(((H - K + 1) * (W - K + 1) + 255) / 256, M, B);
    conv<<<grid, 256>>>(y, x, w, B, M, C, H, W, K);
}
