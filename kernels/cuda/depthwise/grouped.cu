// Grouped: convolutions whose groups have few filters.
//
// As depthwise.cu, but a thread has the same pixels of all filters of its group, so each pixel that
// it reads is used for all of them. All channels of a group are in shared memory, or of many some
// after the others: the next ones are on their way meanwhile.
//
// Measured: not yet.
#ifndef GROUP_IN
#define GROUP_IN 4
#define GROUP_OUT 4
#endif
#include "depthwise_fwd.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    gather(y, x, w, bias, unsigned(batch) * GROUPS);
}
