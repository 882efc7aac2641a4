// Wrong: it adds up channels by twos, and forgets the one that an odd number leaves.
// ece408: launch convolve<<<dim3(ceil_div(OH * OW, 256), M, B), 256>>>(y, x, w, C, H, W, K)

extern "C" __global__ void convolve(float *y, const float *x, const float *w, int C, int H, int W,
                                    int K) {
    const int rows = H - K + 1, columns = W - K + 1;
    const int n = blockIdx.x * 256 + threadIdx.x, i = n / columns, j = n % columns;
    const int b = blockIdx.z, m = blockIdx.y, M = gridDim.y;
    if (n >= rows * columns) return;
    float sum = 0;
    for (int c = 0; c + 1 < C; c += 2) {
        const float *first = x + (b * C + c) * H * W, *second = first + H * W;
        const float *by = w + (m * C + c) * K * K;
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += first[(i + p) * W + j + q] * by[p * K + q] +
                       second[(i + p) * W + j + q] * by[(K + p) * K + q];
    }
    y[(b * M + m) * rows * columns + n] = sum;
}
