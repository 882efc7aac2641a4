// 10. Tensor cores in TF32: the matrix product of 5 and 6, 16 pixels by 8 filters by 8 values of k
//     in one instruction.
//
// Changed against 6_register_tiles.cu: the implicit matrix of 5_implicit_gemm.cu again, but shared
// memory holds whole images, or strips of their rows with the halo below, from which lanes gather
// their pixels in the layout of the instruction. k runs over groups of channels, and in a group
// over taps, so each tap is a constant offset from a lane's pixel. Factors are rounded to TF32 (11
// bits): the relative error is near 3e-4, so this kernel needs the user's permission. Blocks are
// persistent: each prepares its weights once and takes every gridDim.x-th strip.
//
// Measured: fa19_2 1.05 ms (2.60x); batch 10000, NVIDIA H200.
#include "tf32_strips.cuh"

// Rounds to TF32: tensor cores ignore the low 13 bits.
__device__ __forceinline__ float rounded(float v) {
    return __uint_as_float(__float_as_uint(v) + 0x1000u);
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    const auto add = [](Tiles &sum, int, auto pixel, const float2 *weights) {
        float a[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) a[i][j] = rounded(pixel(i, j));
        }
#pragma unroll
        for (int n = 0; n < FILTER_TILES; n++) {
            const float2 b = weights[n * 32];
#pragma unroll
            for (int i = 0; i < TILES; i++) multiply(sum[i][n], a[i], b);
        }
    };
    convolve_strips(y, x, w, bias, batch, rounded, add);
}
