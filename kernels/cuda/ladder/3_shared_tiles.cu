// 3. Shared-memory tiles: a block loads the pixels that its outputs have in common once.
//
// Changed against 2_constant_weights.cu: a block computes a tile of outputs of one filter, one for
// each thread. For each channel, it first copies the pixels under them, the tile and a halo of
// kernel_h - 1 rows and kernel_w - 1 columns, to shared memory. With one filter for each block
// there is little reuse: copies and barriers cost as much as the L1 cache saves.
//
// Measured: fa19_1 10.68 ms (0.72x), fa19_2 36.82 ms (0.91x); batch 10000, NVIDIA H200.
#include "output.cuh"

constexpr int kMostWeights = 16384;  // constant memory has 64 KiB

__constant__ float weights[kMostWeights];

extern "C" __global__ void convolve(float *__restrict__ y, const float *__restrict__ x,
                                    const float *__restrict__ bias, int batch, int filters,
                                    int channels, int height, int width, int kernel_h,
                                    int kernel_w) {
    extern __shared__ float tile[];
    const int out_h = height - kernel_h + 1, out_w = width - kernel_w + 1;
    const int threads_h = blockDim.y, threads_w = blockDim.x;
    const int tile_h = threads_h + kernel_h - 1, tile_w = threads_w + kernel_w - 1;
    const int across = (out_w + threads_w - 1) / threads_w;
    const int down = (out_h + threads_h - 1) / threads_h;
    unsigned block = blockIdx.x;
    const int j0 = block % across * threads_w;
    block /= across;
    const int i0 = block % down * threads_h;
    block /= down;
    const int m = block % filters, b = block / filters;

    // Beyond the image zeros stay, for the threads beyond the output.
    for (int k = threadIdx.y * threads_w + threadIdx.x; k < tile_h * tile_w;
         k += threads_h * threads_w) {
        tile[k] = 0;
    }
    float sum = 0;
    for (int c = 0; c < channels; c++) {
        const float *plane = x + (b * channels + c) * height * width;
        __syncthreads();
        for (int r = threadIdx.y; r < tile_h && i0 + r < height; r += threads_h) {
            for (int s = threadIdx.x; s < tile_w && j0 + s < width; s += threads_w) {
                tile[r * tile_w + s] = plane[(i0 + r) * width + j0 + s];
            }
        }
        __syncthreads();
        for (int p = 0; p < kernel_h; p++) {
            for (int q = 0; q < kernel_w; q++) {
                sum += tile[(threadIdx.y + p) * tile_w + threadIdx.x + q] *
                       weights[((m * channels + c) * kernel_h + p) * kernel_w + q];
            }
        }
    }
    const int i = i0 + threadIdx.y, j = j0 + threadIdx.x;
    if (i < out_h && j < out_w) {
        store(y + ((b * filters + m) * out_h + i) * out_w + j, sum, bias, m);
    }
}
