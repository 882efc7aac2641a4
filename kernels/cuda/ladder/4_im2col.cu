// 4. A matrix product: im2col writes each output pixel's window as a column of a matrix, which is
//    multiplied by the filters, the rows of another one.
//
// Changed against 3_shared_tiles.cu: shared memory holds tiles of two matrices instead of the
// image, (filters x channels*kernel_h*kernel_w) and (channels*kernel_h*kernel_w x pixels), so
// filters reuse pixels, too. The second matrix takes kernel_h*kernel_w times the memory of the
// image, and writing it takes much of the time: `unroll` and `multiply` process a few images at a
// time. (Chellapilla, Puri and Simard, High Performance Convolutional Neural Networks for Document
// Processing, 2006.)
//
// Measured: fa19_1 12.01 ms (0.89x), fa19_2 32.85 ms (1.12x); batch 10000, NVIDIA H200.
#include "output.cuh"

#ifndef TILE
#define TILE 16
#endif

// columns[image][channel, p, q][pixel] for `images` images from `first` on.
extern "C" __global__ void unroll(float *__restrict__ columns, const float *__restrict__ x,
                                  int first, int images, int channels, int height, int width,
                                  int kernel_h, int kernel_w) {
    const int out_w = width - kernel_w + 1;
    const unsigned pixels = (height - kernel_h + 1) * out_w;
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= images * channels * kernel_h * kernel_w * pixels) return;
    const int i = index % pixels / out_w, j = index % pixels % out_w;
    const unsigned row = index / pixels;
    const int q = row % kernel_w, p = row / kernel_w % kernel_h;
    const unsigned plane = row / (kernel_w * kernel_h);  // of all channels of all images
    columns[index] = x[((first * channels + plane) * height + i + p) * width + j + q];
}

// y[image][filter][pixel] from w[filter][k] and columns[image][k][pixel], k over `depth` values.
extern "C" __global__ void multiply(float *__restrict__ y, const float *__restrict__ w,
                                    const float *__restrict__ columns,
                                    const float *__restrict__ bias, int first, int filters,
                                    int depth, int pixels) {
    __shared__ float filter_tile[TILE][TILE], column_tile[TILE][TILE];
    const int across = (pixels + TILE - 1) / TILE, down = (filters + TILE - 1) / TILE;
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int pixel = blockIdx.x % across * TILE + tx;
    const int filter = blockIdx.x / across % down * TILE + ty;
    const unsigned image = blockIdx.x / across / down;
    columns += image * depth * pixels;

    float sum = 0;
    for (int k0 = 0; k0 < depth; k0 += TILE) {
        const bool row = filter < filters && k0 + tx < depth;
        const bool column = pixel < pixels && k0 + ty < depth;
        __syncthreads();
        filter_tile[ty][tx] = row ? w[filter * depth + k0 + tx] : 0;
        column_tile[ty][tx] = column ? columns[(k0 + ty) * pixels + pixel] : 0;
        __syncthreads();
        for (int k = 0; k < TILE; k++) sum += filter_tile[ty][k] * column_tile[k][tx];
    }
    if (filter < filters && pixel < pixels) {
        store(y + ((first + image) * filters + filter) * pixels + pixel, sum, bias, filter);
    }
}
