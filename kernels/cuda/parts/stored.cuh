// The types of x and y in memory, float or __half, and what is done to x as it is loaded. Arithmetic
// is in float.
#pragma once

#ifdef HALF
#include <cuda_fp16.h>
#endif
#ifndef X_TYPE
#define X_TYPE float
#endif
#ifndef Y_TYPE
#define Y_TYPE float
#endif

#ifdef CONVERT  // statements on v, an element of x in channel c, when it is loaded
#define CONVERT_PARAMETERS , const float *factors, const float *addends  // one for each channel
#define CONVERT_ARGUMENTS , factors, addends
constexpr bool kConverts = true;
#else
#define CONVERT(v, c)
#define CONVERT_PARAMETERS
#define CONVERT_ARGUMENTS
constexpr bool kConverts = false;
#endif

// V neighbouring elements, read and written as vectors.
template <int V, class T>
struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Vector {
    T of[V];
};

template <int V, class T>
__device__ __forceinline__ void read_vector(float (&to)[V], const T *from) {
    const auto found = *reinterpret_cast<const Vector<V, T> *>(from);
#pragma unroll
    for (int i = 0; i < V; i++) to[i] = float(found.of[i]);
}

template <int V>
__device__ __forceinline__ void write_vector(float *to, const float (&from)[V]) {
    Vector<V, float> made;
#pragma unroll
    for (int i = 0; i < V; i++) made.of[i] = from[i];
    *reinterpret_cast<Vector<V, float> *>(to) = made;
}

#ifdef HALF
// Two halves as a word. A vector of halves would be copied half by half.
__device__ __forceinline__ unsigned halves_of(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const unsigned *)&pair;
}

__device__ __forceinline__ void read_pair(float *to, unsigned halves) {
    const float2 pair = __half22float2(*(const __half2 *)&halves);
    to[0] = pair.x, to[1] = pair.y;
}

template <int V>
__device__ __forceinline__ void read_vector(float (&to)[V], const __half *from) {
    if constexpr (V == 1) {
        to[0] = float(*from);
    } else {
        const auto found = *reinterpret_cast<const Vector<V / 2, unsigned> *>(from);
#pragma unroll
        for (int i = 0; i < V / 2; i++) read_pair(to + 2 * i, found.of[i]);
    }
}

// By functions for stores, whose vectors the compiler does not divide.
template <int V>
__device__ __forceinline__ void write_vector(__half *to, const float (&from)[V]) {
    if constexpr (V == 8) {
        const uint2 low = make_uint2(halves_of(from[0], from[1]), halves_of(from[2], from[3]));
        const uint2 high = make_uint2(halves_of(from[4], from[5]), halves_of(from[6], from[7]));
        __stcg((uint4 *)to, make_uint4(low.x, low.y, high.x, high.y));
    } else if constexpr (V == 4) {
        __stcg((uint2 *)to, make_uint2(halves_of(from[0], from[1]), halves_of(from[2], from[3])));
    } else if constexpr (V == 2) {
        *(unsigned *)to = halves_of(from[0], from[1]);
    } else {
        *to = __half(from[0]);
    }
}
#endif
