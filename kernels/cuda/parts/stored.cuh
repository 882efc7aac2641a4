// The types of x and y in memory, float or __half. Arithmetic is in float.
#pragma once

#if defined(HALF)
#include <cuda_fp16.h>
#endif
#ifndef X_TYPE
#define X_TYPE float
#endif
#ifndef Y_TYPE
#define Y_TYPE float
#endif

// V neighbouring elements, in vectors of 16 bytes or as many as there are. The functions for stores
// keep the compiler from dividing vectors.
template <int V, class T>
__device__ __forceinline__ void read_vector(float (&to)[V], const T *from) {
    struct alignas(V * sizeof(T)) {
        T of[V];
    } found = *(const decltype(found) *)from;
#pragma unroll
    for (int i = 0; i < V; i++) to[i] = float(found.of[i]);
}

template <int V>
__device__ __forceinline__ void read_vector(float (&to)[V], const float *from) {
    if constexpr (V % 4 == 0) {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            const float4 found = *(const float4 *)(from + i);
            to[i] = found.x, to[i + 1] = found.y, to[i + 2] = found.z, to[i + 3] = found.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) to[i] = from[i];
    }
}

template <int V>
__device__ __forceinline__ void write_vector(float *to, const float (&from)[V]) {
    if constexpr (V % 4 == 0) {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
            __stcg((float4 *)(to + i), make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]));
        }
    } else {
#pragma unroll
        for (int i = 0; i < V; i++) to[i] = from[i];
    }
}

#ifdef HALF
// Two halves as a word. A struct of halves would be copied half by half.
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
    if constexpr (V == 8) {
        const uint4 found = *(const uint4 *)from;
        read_pair(to, found.x), read_pair(to + 2, found.y);
        read_pair(to + 4, found.z), read_pair(to + 6, found.w);
    } else if constexpr (V == 4) {
        const uint2 found = *(const uint2 *)from;
        read_pair(to, found.x), read_pair(to + 2, found.y);
    } else if constexpr (V == 2) {
        read_pair(to, *(const unsigned *)from);
    } else {
        to[0] = float(*from);
    }
}

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
