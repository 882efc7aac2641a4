// Wrong: each block computes a row, and there is one block too few.
// ece408: launch convolve<<<dim3(max(1, OH - 1), M, B), 64>>>(y, x, w, C, H, W, K)

extern "C" __global__ void convolve(float *y, const float *x, const float *w, int C, int H, int W,
                                    int K) {
    const int b = blockIdx.z, m = blockIdx.y, M = gridDim.y, i = blockIdx.x;
    for (int j = threadIdx.x; j <= W - K; j += blockDim.x) {
        float sum = 0;
        for (int c = 0; c < C; c++)
            for (int p = 0; p < K; p++)
                for (int q = 0; q < K; q++)
                    sum += x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
        y[((b * M + m) * (H - K + 1) + i) * (W - K + 1) + j] = sum;
    }
}
