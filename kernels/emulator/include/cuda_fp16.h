// Half precision, like CUDA's header of this name: each result is rounded once, to nearest.
#pragma once

#include "cuda_runtime.h"

struct __half_raw {
    unsigned short x;
};

struct __half2_raw {
    unsigned short x, y;
};

namespace ece408_emulator {

// Rounds a float to nearest, ties to even; larger numbers become infinite.
ECE408_UNCHECKED inline unsigned short half_bits(float value) {
    const uint32_t bits = value_of<uint32_t>(ece408_emulator::bits(value));
    const unsigned sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return sign | 0x7E00;
    if (magnitude >= 0x477FF000) return sign | 0x7C00;
    if (magnitude < 0x38800000) {
        // Below the smallest normal number steps are 2^-24.
        const float step = value_of<float>(magnitude);
        return sign | static_cast<unsigned>(nearbyintf(step * 16777216.0f));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return sign | ((magnitude + 0xFFF + odd - 0x38000000) >> 13);
}

ECE408_UNCHECKED inline float half_value(unsigned short half) {
    const unsigned exponent = half >> 10 & 31, fraction = half & 0x3FF;
    float found;
    if (exponent == 31)
        found = fraction ? NAN : INFINITY;
    else if (!exponent)
        found = fraction / 16777216.0f;
    else
        found = value_of<float>((exponent + 112) << 23 | fraction << 13);
    return half & 0x8000 ? -found : found;
}

// Rounds down (`up` < 0) or up (`up` > 0) instead.
ECE408_UNCHECKED inline unsigned short half_bits_toward(float value, int up) {
    const unsigned short near = half_bits(value);
    const float found = half_value(near);
    const int step = found < value && up > 0 ? 1 : found > value && up < 0 ? -1 : 0;
    if (!step) return near;
    if (!(near & 0x7FFF)) return step > 0 ? 0x0001 : 0x8001;
    return near & 0x8000 ? near - step : near + step;
}

}  // namespace ece408_emulator

struct alignas(2) __half {
    unsigned short __x;

    __half() = default;
    __half(const __half_raw& raw) : __x(raw.x) {}
    __half(float value) : __x(ece408_emulator::half_bits(value)) {}
    __half(double value) : __half(static_cast<float>(value)) {}
    __half(int value) : __half(static_cast<float>(value)) {}
    __half(unsigned value) : __half(static_cast<float>(value)) {}
    __half(short value) : __half(static_cast<float>(value)) {}
    __half(unsigned short value) : __half(static_cast<float>(value)) {}
    __half(long long value) : __half(static_cast<float>(value)) {}
    __half(unsigned long long value) : __half(static_cast<float>(value)) {}
    operator float() const { return ece408_emulator::half_value(__x); }
    operator __half_raw() const { return {__x}; }
    __half& operator=(float value) { return *this = __half(value); }
    __half& operator=(const __half&) = default;
};
typedef __half half;

#define ECE408_HALF_OPERATOR(op)                                                               \
    inline __half operator op(const __half& a, const __half& b) { return float(a) op float(b); } \
    inline __half& operator op##=(__half& a, const __half& b) { return a = a op b; }
ECE408_HALF_OPERATOR(+)
ECE408_HALF_OPERATOR(-)
ECE408_HALF_OPERATOR(*)
ECE408_HALF_OPERATOR(/)
#undef ECE408_HALF_OPERATOR
inline __half operator-(const __half& a) { return -float(a); }
#define ECE408_HALF_COMPARISON(op) \
    inline bool operator op(const __half& a, const __half& b) { return float(a) op float(b); }
ECE408_HALF_COMPARISON(==)
ECE408_HALF_COMPARISON(!=)
ECE408_HALF_COMPARISON(<)
ECE408_HALF_COMPARISON(<=)
ECE408_HALF_COMPARISON(>)
ECE408_HALF_COMPARISON(>=)
#undef ECE408_HALF_COMPARISON

struct alignas(4) __half2 {
    __half x, y;

    __half2() = default;
    __half2(const __half& x, const __half& y) : x(x), y(y) {}
    // Copied as one word, as a GPU loads and stores it.
    __half2(const __half2& other) { *this = other; }
    __half2& operator=(const __half2& other) {
        typedef uint32_t __attribute__((may_alias)) word;
        *reinterpret_cast<word*>(this) = *reinterpret_cast<const word*>(&other);
        return *this;
    }
};
typedef __half2 half2;

inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __float2half_ru(float x) { return __half_raw{ece408_emulator::half_bits_toward(x, 1)}; }
inline __half __float2half_rd(float x) { return __half_raw{ece408_emulator::half_bits_toward(x, -1)}; }
inline __half __float2half_rz(float x) { return x < 0 ? __float2half_ru(x) : __float2half_rd(x); }
inline __half __double2half(double x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half __int2half_rn(int x) { return x; }
inline __half __uint2half_rn(unsigned x) { return x; }
inline __half __short2half_rn(short x) { return x; }
inline int __half2int_rn(__half x) { return static_cast<int>(nearbyintf(x)); }
inline int __half2int_rz(__half x) { return static_cast<int>(float(x)); }
inline __half __ushort_as_half(unsigned short x) { return __half_raw{x}; }
inline unsigned short __half_as_ushort(__half x) { return x.__x; }

inline __half __hadd(__half a, __half b) { return a + b; }
inline __half __hsub(__half a, __half b) { return a - b; }
inline __half __hmul(__half a, __half b) { return a * b; }
inline __half __hdiv(__half a, __half b) { return a / b; }
inline __half __hneg(__half a) { return -a; }
inline __half __habs(__half a) { return fabsf(a); }
inline __half __hmax(__half a, __half b) { return fmaxf(a, b); }
inline __half __hmin(__half a, __half b) { return fminf(a, b); }
// Exact in double precision, so that only the final rounding counts.
inline __half __hfma(__half a, __half b, __half c) {
    return static_cast<float>(static_cast<double>(float(a)) * float(b) + float(c));
}
inline bool __heq(__half a, __half b) { return a == b; }
inline bool __hne(__half a, __half b) { return a != b; }
inline bool __hlt(__half a, __half b) { return a < b; }
inline bool __hle(__half a, __half b) { return a <= b; }
inline bool __hgt(__half a, __half b) { return a > b; }
inline bool __hge(__half a, __half b) { return a >= b; }
inline bool __hisnan(__half a) { return float(a) != float(a); }
inline __half hsqrt(__half a) { return sqrtf(a); }
inline __half hexp(__half a) { return expf(a); }

inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __float2half2_rn(float a) { return {a, a}; }
inline __half2 __floats2half2_rn(float a, float b) { return {a, b}; }
inline __half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }
inline float2 __half22float2(__half2 a) { return {a.x, a.y}; }
inline float __low2float(__half2 a) { return a.x; }
inline float __high2float(__half2 a) { return a.y; }
inline __half __low2half(__half2 a) { return a.x; }
inline __half __high2half(__half2 a) { return a.y; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {a.x + b.x, a.y + b.y}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {a.x - b.x, a.y - b.y}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {a.x * b.x, a.y * b.y}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
#define ECE408_HALF2_OPERATOR(op, function)                                                     \
    inline __half2 operator op(const __half2& a, const __half2& b) { return function(a, b); }   \
    inline __half2& operator op##=(__half2& a, const __half2& b) { return a = function(a, b); }
ECE408_HALF2_OPERATOR(+, __hadd2)
ECE408_HALF2_OPERATOR(-, __hsub2)
ECE408_HALF2_OPERATOR(*, __hmul2)
#undef ECE408_HALF2_OPERATOR
