// Two neighbouring elements of a row at once, where they are known to lie together in one word of
// eight bytes; one by one where they are not.
#pragma once

#include "output.cuh"

// Whether pairs that start at even elements of an array can be accessed together.
__device__ __forceinline__ bool aligned(const void *array) {
    return (unsigned long long)array % sizeof(float2) == 0;
}

__device__ __forceinline__ float2 load_pair(const float *from, bool together) {
    return together ? __ldg((const float2 *)from) : make_float2(__ldg(from), __ldg(from + 1));
}

// Write two elements of the output; with `leave` they leave the caches as soon as possible.
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
