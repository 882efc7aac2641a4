// Floats as sums of two fp16 numbers, after a power-of-two scale into their range.
#pragma once

#include <cuda_fp16.h>
#include <stdint.h>

// The larger of two magnitudes; ignores NaN and, with `finite`, infinity.
__device__ __forceinline__ float larger(float most, float v, bool finite) {
    return finite && isinf(v) ? most : fmaxf(most, fabsf(v));
}

// The largest magnitude in a warp. Integers with the bits of positive floats have the same order.
__device__ __forceinline__ float largest_of_warp(float most) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(most)));
}

// The power of two that scales a magnitude to between 2^14 and 2^15, or as near as floats go.
__device__ __forceinline__ float scale_of(float magnitude) {
    return __uint_as_float(min(268u - (__float_as_uint(magnitude) >> 23), 253u) << 23);
}

__device__ __forceinline__ float inverse(float power_of_two) {
    return __uint_as_float((254u << 23) - __float_as_uint(power_of_two));
}

// One part of two numbers; the second number is in the upper bits.
__device__ __forceinline__ uint32_t pair_of(float a, float b, int part) {
    __half2 pair = __floats2half2_rn(a, b);
    if (part == 1) {
        const float2 first = __half22float2(pair);
        pair = __floats2half2_rn(a - first.x, b - first.y);
    }
    return *(const uint32_t *)&pair;
}

// The power-of-two scale for numbers of this largest magnitude, and the factor that reverses it;
// NaN beyond the range of the arithmetic.
__device__ __forceinline__ float scale_for(unsigned most, float *factor) {
    const int exponent = int(most >> 23) - 127;
    const bool usable = most == 0 || (exponent >= -96 && exponent <= 96);
    const float scale = most && usable ? scale_of(__uint_as_float(most)) : 1;
    *factor = usable ? inverse(scale) : __uint_as_float(0x7fc00000u);
    return scale;
}

// The larger magnitude, or a NaN if one is NaN.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
    return larger;
}

// The magnitude's bits: infinity and NaN are larger than all others.
__device__ __forceinline__ unsigned magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

#include "record.cuh"
