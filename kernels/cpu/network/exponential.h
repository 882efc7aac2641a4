// exp, and functions of it, in float and in operations that compilers vectorise.
#pragma once

#include "micro/half.h"

namespace ece408 {
namespace {

// Off by less than two units in the last place; NaN stays NaN.
inline float exponential(float x) {
    // Beyond these the result is infinite, or zero.
    x = x > 89.f ? 89.f : x < -104.f ? -104.f : x;
    // x = n * log(2) + r; the large addend leaves n in the low bits of the sum.
    constexpr float kLarge = 12582912.f;
    const float sum = x * 1.44269504f + kLarge, n = sum - kLarge;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.f / 5040;
    p = p * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + .5f;
    p = p * r * r + r + 1;
    // 2^n in two factors, as it may be beyond the range of float.
    const auto power = static_cast<int32_t>(bits_of_float(sum) - bits_of_float(kLarge));
    const int32_t half = power >> 1;
    const auto power_of_two = [](int32_t k) {
        return float_of_bits(static_cast<uint32_t>(k + 127) << 23);
    };
    return p * power_of_two(half) * power_of_two(power - half);
}

// exp(x) - 1, also where that is close to 0.
inline float exponential_minus_one(float x) {
    float p = 1.f / 40320;
    p = p * x + 1.f / 5040;
    p = p * x + 1.f / 720;
    p = p * x + 1.f / 120;
    p = p * x + 1.f / 24;
    p = p * x + 1.f / 6;
    p = p * x + .5f;
    const float far = exponential(x) - 1;
    return __builtin_fabsf(x) < .5f ? (p * x + 1) * x : far;
}

inline float hyperbolic_tangent(float x) {
    const float size = __builtin_fabsf(x);
    // From here on it is 1 in float.
    const float power = exponential_minus_one(2 * (size > 10.f ? 10.f : size));
    return __builtin_copysignf(power / (power + 2), x);
}

}  // namespace
}  // namespace ece408
