// Wrong: tiles of 16 x 16 threads end one column too early.
// ece408: launch convolve<<<dim3(ceil_div(OW, 16), ceil_div(OH, 16), B * M), dim3(16, 16)>>>(
//                           y, x, w, M, C, H, W, K)

extern "C" __global__ void convolve(float *y, const float *x, const float *w, int M, int C, int H, int W,
                                    int K) {
    const int b = blockIdx.z / M, m = blockIdx.z % M;
    const int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    if (i > H - K || j >= W - K) return;
    float sum = 0;
    for (int c = 0; c < C; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
    y[((b * M + m) * (H - K + 1) + i) * (W - K + 1) + j] = sum;
}
