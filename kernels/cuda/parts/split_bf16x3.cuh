// Floats as sums of three bf16 numbers, which keep all 24 bits of every float. (Two fp16 numbers
// keep 23, and fewer of numbers that are small beside the largest.)
#pragma once

#include <stdint.h>

// A factor before the split that keeps the parts of the smallest numbers in the range of bf16. With
// numbers from 2^104 on, or products from 2^80 on, sums are infinite or NaN.
constexpr float kUp = 1 << 24;

// One of the three parts of two numbers; the second number is in the upper bits.
__device__ __forceinline__ uint32_t pair_of(float a, float b, int part) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    if (part == 0) return pair;
    const float rest_of_a = a - __uint_as_float(pair << 16);
    const float rest_of_b = b - __uint_as_float(pair & 0xffff0000u);
    return pair_of(rest_of_a, rest_of_b, part - 1);
}

#include "record.cuh"
