// Numbers as sums of two of half precision, after a power of two has brought them into its range.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

// The larger of two magnitudes; a NaN does not count, and with `finite` no infinity does.
__device__ __forceinline__ float larger(float most, float v, bool finite) {
    return finite && isinf(v) ? most : fmaxf(most, fabsf(v));
}

// The largest of a warp's magnitudes: whole numbers of the same bits are in the same order.
__device__ __forceinline__ float largest_of_warp(float most) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(most)));
}

// The power of two that brings a magnitude to 2^14 or up to twice that, or as near as floats go.
__device__ __forceinline__ float scale_of(float magnitude) {
    return __uint_as_float(min(268u - (__float_as_uint(magnitude) >> 23), 253u) << 23);
}

__device__ __forceinline__ float inverse(float power_of_two) {
    return __uint_as_float((254u << 23) - __float_as_uint(power_of_two));
}

// One part of two numbers, the second in the upper bits.
__device__ __forceinline__ uint32_t pair_of(float a, float b, int part) {
    __half2 pair = __floats2half2_rn(a, b);
    if (part == 1) {
        const float2 first = __half22float2(pair);
        pair = __floats2half2_rn(a - first.x, b - first.y);
    }
    return *(const uint32_t *)&pair;
}
