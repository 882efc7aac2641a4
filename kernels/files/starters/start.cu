// A convolution on the GPU: right, and slow. Each thread computes one element of y, and reads all
// that it needs from global memory. Make it faster; `ece408 lab check` says whether it is still right.
//
// Arrays are float32 and contiguous: x[B][C][H][W], w[M][C][K][K], y[B][M][H-K+1][W-K+1], and
//     y[b][m][i][j] = sum over c, p, q of x[b][c][i+p][j+q] * w[m][c][p][q]
//
// The comment below says how the kernel is launched: grid, block and arguments, as in CUDA. B, M, C, H,
// W, K and the output's OH and OW are the layer's; names that this file defines as numbers work too.
//
// ece408: launch convolve<<<dim3(ceil_div(OH * OW, THREADS), M, B), THREADS>>>(y, x, w, C, H, W, K)

#define THREADS 256

extern "C" __global__ void convolve(float *y, const float *x, const float *w, int C, int H, int W,
                                    int K) {
    const int out_h = H - K + 1, out_w = W - K + 1;
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel >= out_h * out_w) return;
    const int b = blockIdx.z, m = blockIdx.y, M = gridDim.y;
    const int i = pixel / out_w, j = pixel % out_w;

    float sum = 0;
    for (int c = 0; c < C; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
    y[(b * M + m) * out_h * out_w + pixel] = sum;
}
