// Grouped: convolutions whose groups have few filters.
//
// As depthwise.cu, but a thread has the same pixels of all filters of its group, and uses each
// pixel that it reads for all of them. Shared memory holds all channels of a group, or some of
// many, with the next ones in flight.
//
// Measured: not yet.
#ifndef GROUP_IN
#define GROUP_IN 4
#define GROUP_OUT 4
#endif
#include "depthwise_fwd.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    convolve(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    gather(y, x, w, bias, unsigned(batch) * GROUPS);
}
