// 5. Implicit GEMM: the same matrix product, its second matrix never written to memory.
//
// Changed against 4_im2col.cu: `multiply` fills its tile of columns straight from the image, as row
// k of the matrix is one channel shifted by one tap. One launch, no workspace. (Chetlur et al.,
// cuDNN: Efficient Primitives for Deep Learning, 2014.)
//
// Measured: fa19_1 8.44 ms (1.42x), fa19_2 23.28 ms (1.41x); batch 10000, NVIDIA H200.
#include "output.cuh"

#ifndef TILE
#define TILE 16
#endif

extern "C" __global__ void convolve(float *__restrict__ y, const float *__restrict__ x,
                                    const float *__restrict__ w, const float *__restrict__ bias,
                                    int filters, int channels, int height, int width, int kernel_h,
                                    int kernel_w) {
    __shared__ float filter_tile[TILE][TILE], column_tile[TILE][TILE];
    const int out_w = width - kernel_w + 1, pixels = (height - kernel_h + 1) * out_w;
    const int depth = channels * kernel_h * kernel_w;
    const int across = (pixels + TILE - 1) / TILE, down = (filters + TILE - 1) / TILE;
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int pixel = blockIdx.x % across * TILE + tx;
    const int filter = blockIdx.x / across % down * TILE + ty;
    const unsigned image = blockIdx.x / across / down;
    const float *window = x + image * channels * height * width + pixel / out_w * width +
                          pixel % out_w;

    float sum = 0;
    for (int k0 = 0; k0 < depth; k0 += TILE) {
        const bool row = filter < filters && k0 + tx < depth;
        const bool column = pixel < pixels && k0 + ty < depth;
        const int q = (k0 + ty) % kernel_w, p = (k0 + ty) / kernel_w % kernel_h;
        const int c = (k0 + ty) / kernel_w / kernel_h;
        __syncthreads();
        filter_tile[ty][tx] = row ? w[filter * depth + k0 + tx] : 0;
        column_tile[ty][tx] = column ? window[(c * height + p) * width + q] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; k++) sum += filter_tile[ty][k] * column_tile[k][tx];
    }
    if (filter < filters && pixel < pixels) {
        store(y + (image * filters + filter) * pixels + pixel, sum, bias, filter);
    }
}
