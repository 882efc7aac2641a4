// 11. Tensor cores at float32 accuracy: every factor is a large TF32 number plus a small one, and
//     three of the four products are added up.
//
// Changed against 10_tf32.cu: tensor cores ignore the low 13 bits of a float32, so v itself serves
// as its large part, and v - (v without those bits) is the small one. Small x large and large x
// small come before large x large; small x small is omitted, as it is below the last bit. Tensor
// cores truncate their accumulators, so every few steps these are added to sums in float32
// registers, which round. (Ootomo and Yokota, Recovering single precision accuracy from Tensor
// Cores while surpassing the FP32 theoretical peak performance, 2022.)
//
// Measured: fa19_2 2.00 ms (0.52x); batch 10000, NVIDIA H200.
#include "tf32_strips.cuh"

#ifndef PROMOTE
#define PROMOTE 4  // steps between additions to the float32 sums, about
#endif

constexpr int kPromotions = kSteps < 2 * PROMOTE ? 1 : kSteps / PROMOTE;

__device__ __forceinline__ float large_part(float v) {
    return __uint_as_float(__float_as_uint(v) & 0xffffe000u);
}

__device__ __forceinline__ float small_part(float v) { return v - large_part(v); }

// sums += a * b for all tiles of pixels and of filters.
__device__ __forceinline__ void multiply_all(Tiles &sums, const float (&a)[TILES][4],
                                             const float2 (&b)[FILTER_TILES]) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int n = 0; n < FILTER_TILES; n++) multiply(sums[i][n], a[i], b[n]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    Tiles running;
    const auto add = [&](Tiles &sum, int step, auto pixel, const float2 *weights) {
        // Runs of steps of nearly equal length, each of which starts from zero.
        const int run = step * kPromotions / kSteps;
        const bool fresh = step == 0 || run != (step - 1) * kPromotions / kSteps;
        const bool last = step == kSteps - 1 || run != (step + 1) * kPromotions / kSteps;
        float large_a[TILES][4], small_a[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                large_a[i][j] = pixel(i, j);
                small_a[i][j] = small_part(large_a[i][j]);
            }
        }
        float2 large_b[FILTER_TILES], small_b[FILTER_TILES];
#pragma unroll
        for (int n = 0; n < FILTER_TILES; n++) {
            large_b[n] = weights[n * 32];
            small_b[n] = make_float2(small_part(large_b[n].x), small_part(large_b[n].y));
        }
        // Ordered by product, so that no multiplication waits for the previous one.
        if (fresh) clear(running);
        multiply_all(running, small_a, large_b);
        multiply_all(running, large_a, small_b);
        multiply_all(running, large_a, large_b);
        if (!last) return;
#pragma unroll
        for (int i = 0; i < TILES * FILTER_TILES * 4; i++) {
            (&sum[0][0][0])[i] += (&running[0][0][0])[i];
        }
    };
    convolve_strips(y, x, w, bias, batch, [](float v) { return v; }, add);
}
