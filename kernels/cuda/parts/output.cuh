// What becomes of a finished sum; macros say which of the cases a file is compiled for.
#pragma once

#ifndef BIAS
#define BIAS 0  // 1: bias[filter] is added
#endif
#ifndef ACCUMULATE
#define ACCUMULATE 0  // 1: the result is added to what the output holds, 0: overwrites it
#endif
#ifndef ACTIVATE
#define ACTIVATE(v)  // statements that make of v, which holds the result, what is stored
#endif

// What y holds, if the result is added to it. To be read for several elements before the first one
// is written: reads behind a write wait for it.
__device__ __forceinline__ float held(const float *y) { return ACCUMULATE ? *y : 0; }

// Write one element of the output, which has `before`. It is not read again here, so it need not
// stay in the cache.
__device__ __forceinline__ void store(float *y, float sum, const float *bias, int filter,
                                      float before) {
    if (BIAS) sum += bias[filter];
    if (ACCUMULATE) sum += before;
    ACTIVATE(sum);
    __stcs(y, sum);
}

__device__ __forceinline__ void store(float *y, float sum, const float *bias, int filter) {
    store(y, sum, bias, filter, held(y));
}
