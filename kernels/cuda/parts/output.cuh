// Epilogue of a kernel: bias, accumulation and activation, selected by macros.
#pragma once

#include "stored.cuh"

#ifndef BIAS
#define BIAS 0  // 1: bias[filter] is added
#endif
#ifndef ACCUMULATE
#define ACCUMULATE 0  // 1: the result is added to the output, 0: overwrites it
#endif
#ifndef ACTIVATE
#define ACTIVATE(v)  // statements on v, the result, before it is stored
#endif

// The old value of y, if the result is added to it. Read several elements before the first write: a
// read after a write waits for it.
template <class T>
__device__ __forceinline__ float held(const T *y) {
    return ACCUMULATE ? float(*y) : 0;
}

// Writes one element of the output, whose old value is `before`. A streaming store: the kernel does
// not read it again.
template <class T>
__device__ __forceinline__ void store_biased(T *y, float sum, float before) {
    if (ACCUMULATE) sum += before;
    ACTIVATE(sum);
    __stcs(y, T(sum));
}

template <class T, class B>
__device__ __forceinline__ void store(T *y, float sum, const B *bias, int filter, float before) {
    if (BIAS) sum += float(bias[filter]);
    store_biased(y, sum, before);
}

template <class T, class B>
__device__ __forceinline__ void store(T *y, float sum, const B *bias, int filter) {
    store(y, sum, bias, filter, held(y));
}
