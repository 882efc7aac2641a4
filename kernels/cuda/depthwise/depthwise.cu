// Depthwise: convolutions whose groups have one channel and one filter.
//
// Few outputs use each pixel, so memory bandwidth is the limit. A block copies rows of a plane, or
// several small planes, to shared memory, and its threads compute columns. With strides, and in
// small planes, threads read their pixels from global memory instead.
//
// Measured: not yet.
#include "depthwise_fwd.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    convolve(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    GATHER(y, x, w, bias, unsigned(batch) * GROUPS);
}
