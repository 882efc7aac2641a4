// Two neighbouring elements of a row in one access of eight bytes, if they are known to be aligned;
// in two accesses otherwise.
#pragma once

#include "output.cuh"

// Whether a float2 at an even element of the array is aligned.
__device__ __forceinline__ bool aligned(const void *array) {
    return (unsigned long long)array % sizeof(float2) == 0;
}

__device__ __forceinline__ float2 load_pair(const float *from, bool together) {
    return together ? __ldg((const float2 *)from) : make_float2(__ldg(from), __ldg(from + 1));
}

// Writes two elements of the output; with `leave` as streaming stores.
template <bool leave>
__device__ __forceinline__ void store_pair(float *y, float2 sum, const float *bias, int filter,
                                           bool together) {
    if (!together || ACCUMULATE) {
        store(y, sum.x, bias, filter);
        store(y + 1, sum.y, bias, filter);
    } else {
        if (BIAS) sum = make_float2(sum.x + bias[filter], sum.y + bias[filter]);
        ACTIVATE(sum.x);
        ACTIVATE(sum.y);
        if (leave) {
            __stcs((float2 *)y, sum);
        } else {
            *(float2 *)y = sum;
        }
    }
}
