// The gradient for x of convolutions whose groups have few channels: dx from w and dy, as
// depthwise_backward_data.cu and grouped.cu.
//
// Measured: no, it is not on the ladder.
#ifndef GROUP_IN
#define GROUP_IN 4
#define GROUP_OUT 4
#endif
#define BACKWARD 1
#include "depthwise_fwd.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    backward_data(float *__restrict__ dx, const float *__restrict__ w, const float *__restrict__ dy,
                  int batch) {
    gather(dx, dy, w, nullptr, unsigned(batch) * GROUPS);
}
