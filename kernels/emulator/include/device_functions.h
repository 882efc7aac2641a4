// CUDA's math functions (CUDA Math API); the fast ones are as exact as the others.
#pragma once

// Like CUDA's, also for mixed types.
#define ECE408_LEAST_AND_MOST(A, B, R)                                        \
    inline R min(A a, B b) { return static_cast<R>(b) < static_cast<R>(a) ? b : a; } \
    inline R max(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? b : a; }
ECE408_LEAST_AND_MOST(int, int, int)
ECE408_LEAST_AND_MOST(unsigned, unsigned, unsigned)
ECE408_LEAST_AND_MOST(int, unsigned, unsigned)
ECE408_LEAST_AND_MOST(unsigned, int, unsigned)
ECE408_LEAST_AND_MOST(long, long, long)
ECE408_LEAST_AND_MOST(unsigned long, unsigned long, unsigned long)
ECE408_LEAST_AND_MOST(long long, long long, long long)
ECE408_LEAST_AND_MOST(unsigned long long, unsigned long long, unsigned long long)
ECE408_LEAST_AND_MOST(float, float, float)
ECE408_LEAST_AND_MOST(double, double, double)
ECE408_LEAST_AND_MOST(float, double, double)
ECE408_LEAST_AND_MOST(double, float, double)
#undef ECE408_LEAST_AND_MOST

#define ECE408_LOAD(name) \
    template <class T>    \
    inline T name(const T* address) { return *address; }
ECE408_LOAD(__ldg)
ECE408_LOAD(__ldca)
ECE408_LOAD(__ldcg)
ECE408_LOAD(__ldcs)
ECE408_LOAD(__ldcv)
ECE408_LOAD(__ldlu)
#undef ECE408_LOAD
#define ECE408_STORE(name) \
    template <class T>     \
    inline void name(T* address, T value) { *address = value; }
ECE408_STORE(__stcg)
ECE408_STORE(__stcs)
ECE408_STORE(__stwb)
ECE408_STORE(__stwt)
#undef ECE408_STORE

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1 / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __saturatef(float x) { return x > 1 ? 1 : x > 0 ? x : 0; }

inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xFFFFFF) * (b & 0xFFFFFF); }
inline int __mulhi(int a, int b) { return int64_t{a} * b >> 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) found |= (x >> i & 1) << (31 - i);
    return found;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (uint64_t{high} << 32 | low) << (by & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (uint64_t{high} << 32 | low) >> (by & 31);
}
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
inline unsigned __float2uint_rd(float x) { return static_cast<unsigned>(floorf(x)); }
inline unsigned __float2uint_ru(float x) { return static_cast<unsigned>(ceilf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __float_as_int(float x) { return ece408_emulator::value_of<int>(ece408_emulator::bits(x)); }
inline unsigned __float_as_uint(float x) { return ece408_emulator::value_of<unsigned>(ece408_emulator::bits(x)); }
inline float __int_as_float(int x) { return ece408_emulator::value_of<float>(ece408_emulator::bits(x)); }
inline float __uint_as_float(unsigned x) { return ece408_emulator::value_of<float>(ece408_emulator::bits(x)); }
inline double __longlong_as_double(long long x) { return ece408_emulator::value_of<double>(x); }
inline long long __double_as_longlong(double x) { return ece408_emulator::bits(x); }

inline long long clock64() {
#if defined(__x86_64__)
    return static_cast<long long>(__builtin_ia32_rdtsc());
#else
    return 0;
#endif
}
