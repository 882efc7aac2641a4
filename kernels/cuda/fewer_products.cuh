// Winograd's F(2, 3) along the rows of one channel: what 15_fewer_products.cu says, in registers.
// A thread has ROWS pairs of neighbouring outputs below each other.
#pragma once

#include "shape.cuh"

#ifndef ROWS
#define ROWS 6
#endif

constexpr int kWindowRows = ROWS + KERNEL_H - 1;  // of pixels under a thread's outputs
constexpr int kWindow = KERNEL_W + 1;             // pixels of a row under a pair
constexpr int kGroups = KERNEL_W / 2;             // of two taps of a row, the last of three
constexpr int kRowProducts = 3 * kGroups + 1;
constexpr int kProducts = KERNEL_H * kRowProducts;
constexpr int kFactors = divide_up(kProducts, 4) * 4;  // of a filter, in whole words of 16 bytes

static_assert(CHANNELS == 1, "this is for one input channel");
static_assert(KERNEL_W % 2 == 1 && KERNEL_W > 1, "a row of taps is of twos and one three");

// Which of Z0 to Z3 a product of a row belongs to.
__host__ __device__ constexpr int sum_of(int product) {
    return product == 3 * kGroups ? 3 : product % 3;
}

// What a product of one row of taps has of the weights.
__device__ __forceinline__ float factor(const float *taps, int product) {
    if (product == 3 * kGroups) return taps[KERNEL_W - 1];
    const float *group = taps + product / 3 * 2;
    if (product % 3 == 0) return group[0];
    const float last = product / 3 == kGroups - 1 ? group[2] : 0;
    return (group[0] + (product % 3 == 1 ? group[1] : -group[1]) + last) / 2;
}

// All filters' factors; by all of the block's threads, of which there are so many.
__device__ __forceinline__ void load_factors(float (*factors)[kFactors], const float *w,
                                             int threads) {
    for (int i = threadIdx.x; i < FILTERS * kProducts; i += threads) {
        const int row = i / kRowProducts;  // of all filters' taps
        factors[i / kProducts][i % kProducts] = factor(w + row * KERNEL_W, i % kRowProducts);
    }
}

// What the products of a row have of the pixels under a pair.
__device__ __forceinline__ void transform(float (&made)[kRowProducts],
                                          const float (&pixels)[kWindow]) {
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
        const float *d = pixels + 2 * group;
        made[3 * group] = d[0] - d[2];
        made[3 * group + 1] = d[1] + d[2];
        made[3 * group + 2] = d[2] - d[1];
    }
    made[3 * kGroups] = pixels[kWindow - 3] - pixels[kWindow - 1];
}

// A filter's outputs.
__device__ __forceinline__ void convolve_pairs(float2 (&outputs)[ROWS],
                                               const float (&made)[kWindowRows][kRowProducts],
                                               const float *factors) {
    float sum[ROWS][4] = {};
#pragma unroll
    for (int first = 0; first < kFactors; first += 4) {
        const float4 four = *(const float4 *)(factors + first);
        const float some[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i >= kProducts) break;
            const int p = (first + i) / kRowProducts, product = (first + i) % kRowProducts;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float &z = sum[r][sum_of(product)];
                z = fmaf(made[r + p][product], some[i], z);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float *z = sum[r];
        outputs[r] = make_float2(z[0] + (z[1] + z[2]), (z[1] - z[2]) - z[3]);
    }
}
