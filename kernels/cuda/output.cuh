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

// Write one element of the output. It is not read again here, so it need not stay in the cache.
__device__ __forceinline__ void store(float *y, float sum, const float *bias, int filter) {
    if (BIAS) sum += bias[filter];
    if (ACCUMULATE) sum += *y;
    ACTIVATE(sum);
    __stcs(y, sum);
}
