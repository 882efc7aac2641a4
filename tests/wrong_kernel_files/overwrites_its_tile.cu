// Wrong: threads load the next channel's tile while others still need this one's.
// ece408: launch convolve<<<dim3(ceil_div(OW, 16), ceil_div(OH, 16),
//                                B * M), dim3(16, 16), 4 * (K + 15) * (K + 15)>>>(y, x, w, M, C, H, W, K)

extern "C" __global__ void convolve(float *y, const float *x, const float *w, int M, int C, int H, int W,
                                    int K) {
    extern __shared__ float tile[];
    const int b = blockIdx.z / M, m = blockIdx.z % M, side = K + 15;
    const int top = blockIdx.y * 16, left = blockIdx.x * 16;
    float sum = 0;
    for (int c = 0; c < C; c++) {
        for (int n = threadIdx.y * 16 + threadIdx.x; n < side * side; n += 256) {
            const int i = top + n / side, j = left + n % side;
            tile[n] = i < H && j < W ? x[((b * C + c) * H + i) * W + j] : 0;
        }
        __syncthreads();
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += tile[(threadIdx.y + p) * side + threadIdx.x + q] * w[((m * C + c) * K + p) * K + q];
    }
    const int i = top + threadIdx.y, j = left + threadIdx.x;
    if (i <= H - K && j <= W - K) y[((b * M + m) * (H - K + 1) + i) * (W - K + 1) + j] = sum;
}
