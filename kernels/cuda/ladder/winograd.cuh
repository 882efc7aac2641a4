// Winograd's F(2, 3) along the rows of one channel, in registers, as 15_winograd.cu describes. A
// thread has ROWS vertical neighbours, each two columns wide.
#pragma once

#include "shape.cuh"

#ifndef ROWS
#define ROWS 6
#endif

constexpr int kWindowRows = ROWS + KERNEL_H - 1;  // of pixels under a thread's outputs
constexpr int kWindow = KERNEL_W + 1;             // pixels of a row under two columns
constexpr int kGroups = KERNEL_W / 2;             // groups of two taps of a row; the last has three
constexpr int kRowProducts = 3 * kGroups + 1;
constexpr int kProducts = KERNEL_H * kRowProducts;
constexpr int kFactors = divide_up(kProducts, 4) * 4;  // of a filter, in whole words of 16 bytes

static_assert(CHANNELS == 1, "this is for one input channel");
static_assert(KERNEL_W % 2 == 1 && KERNEL_W > 1, "a row of taps is of twos and one three");

// The order of a row's products: Z1 of all groups, Z2 of all groups, Z3 with its sign changed, and
// Z0 of all groups.
constexpr int kSums = 0, kDifferences = kGroups, kLast = 2 * kGroups, kFirsts = kLast + 1;

// The transformed weight of a product of one row of taps.
__device__ __forceinline__ float factor(const float *taps, int product) {
    if (product == kLast) return taps[KERNEL_W - 1];
    if (product >= kFirsts) return taps[2 * (product - kFirsts)];
    const float *group = taps + product % kGroups * 2;
    const float last = product % kGroups == kGroups - 1 ? group[2] : 0;
    return (group[0] + (product < kDifferences ? group[1] : -group[1]) + last) / 2;
}

// Transforms all filters' weights, stored by product, with all `threads` threads of the block.
__device__ __forceinline__ void load_factors(float (*factors)[kFactors], const float *w,
                                             int threads) {
    for (int i = threadIdx.x; i < FILTERS * kProducts; i += threads) {
        const int row = i / kRowProducts, product = i % kRowProducts;  // of all filters' taps
        factors[row / KERNEL_H][product * KERNEL_H + row % KERNEL_H] =
            factor(w + row * KERNEL_W, product);
    }
    for (int m = threadIdx.x; m < FILTERS; m += threads) {
        for (int i = kProducts; i < kFactors; i++) factors[m][i] = 0;  // padding, read as well
    }
}

// The transformed pixels of a row under two columns.
__device__ __forceinline__ void transform(float (&made)[kRowProducts],
                                          const float (&pixels)[kWindow]) {
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
        const float *d = pixels + 2 * group;
        made[kSums + group] = d[1] + d[2];
        made[kDifferences + group] = d[2] - d[1];
        made[kFirsts + group] = d[0] - d[2];
    }
    made[kLast] = pixels[kWindow - 1] - pixels[kWindow - 3];
}

// The order of a thread's rows for one factor: from the last but one down to the first, then the
// last, because the next factor uses the same pixels in the last row but one.
__host__ __device__ constexpr int row_of(int i) {
    return (2 * ROWS - 2 - i) % ROWS;
}

// A filter's outputs. A multiply-add takes two cycles when two of its operands are in the same one
// of the two register banks; an operand of the previous instruction is in neither. In this order,
// each instruction has its factor or its pixels in common with the previous one, except a product's
// first.
__device__ __forceinline__ void convolve_pairs(float2 (&outputs)[ROWS],
                                               const float (&made)[kWindowRows][kRowProducts],
                                               const float *factors) {
    float left[ROWS] = {}, right[ROWS] = {};  // Z1 and Z2 at first
#pragma unroll
    for (int first = 0; first < kFactors; first += 4) {
        const float4 four = *(const float4 *)(factors + first);
        const float some[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = first; i < min(first + 4, kProducts); i++) {
            const int product = i / KERNEL_H, p = i % KERNEL_H;
            if (product == kLast && p == 0) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float sum = left[r] + right[r], difference = left[r] - right[r];
                    left[r] = sum, right[r] = difference;
                }
            }
            const bool to_left = product < kDifferences || product >= kFirsts;
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const int r = row_of(k);
                float &sum = to_left ? left[r] : right[r];
                sum = fmaf(made[r + p][product], some[i - first], sum);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) outputs[r] = make_float2(left[r], right[r]);
}
