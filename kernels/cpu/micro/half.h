// IEEE half precision as stored, and its conversion to and from float, rounding to nearest even.
#pragma once

#include <stdint.h>
#include <string.h>

namespace ece408 {

struct Half {
    uint16_t bits;
};

namespace {

inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float portable_to_float(Half half) {
    const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
    const uint32_t exponent = (half.bits >> 10) & 0x1fu, fraction = half.bits & 0x3ffu;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000u | fraction << 13);
    // A subnormal is its fraction times 2^-24; that product is exact.
    if (exponent == 0) {
        const float value = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -value : value;
    }
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

inline Half portable_to_half(float value) {
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    // From 65520 on the nearest half is infinity.
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {
        // Subnormal: adding 1/2 leaves the multiple of 2^-24 in the low bits, rounded by the sum.
        const float shifted = float_of_bits(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (bits_of_float(shifted) & 0x7ffu))};
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    const uint32_t rounded = magnitude + 0xfffu + odd;
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

}  // namespace
}  // namespace ece408
