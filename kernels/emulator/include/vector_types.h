// CUDA's vector types, with its alignments.
#pragma once

#define ECE408_VECTOR(T, name, align1, align2, align4)                                        \
    struct name##1 { T x; };                                                                  \
    struct alignas(align2) name##2 { T x, y; };                                               \
    struct name##3 { T x, y, z; };                                                            \
    struct alignas(align4) name##4 { T x, y, z, w; };                                         \
    inline name##1 make_##name##1(T x) { return {x}; }                                        \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                        \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint1 make_uint1(unsigned x) { return {x}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
ECE408_VECTOR(signed char, char, 1, 2, 4)
ECE408_VECTOR(unsigned char, uchar, 1, 2, 4)
ECE408_VECTOR(short, short, 2, 4, 8)
ECE408_VECTOR(unsigned short, ushort, 2, 4, 8)
ECE408_VECTOR(int, int, 4, 8, 16)
ECE408_VECTOR(float, float, 4, 8, 16)
ECE408_VECTOR(double, double, 8, 16, 16)
ECE408_VECTOR(long long, longlong, 8, 16, 16)
ECE408_VECTOR(unsigned long long, ulonglong, 8, 16, 16)
#undef ECE408_VECTOR
