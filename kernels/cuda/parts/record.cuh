// Records of 8 numbers, the layout that tensor cores read. pair_of is that of split_fp16x2.cuh or
// of split_bf16x3.cuh.
#pragma once

__device__ __forceinline__ uint4 record(const float *values, float scale, int part) {
    return make_uint4(pair_of(values[0] * scale, values[1] * scale, part),
                      pair_of(values[2] * scale, values[3] * scale, part),
                      pair_of(values[4] * scale, values[5] * scale, part),
                      pair_of(values[6] * scale, values[7] * scale, part));
}
