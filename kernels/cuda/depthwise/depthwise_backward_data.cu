// The gradient for x of convolutions whose groups have one channel and one filter: dx from w and
// dy.
//
// As depthwise.cu, with dy in place of x: a pixel's sum is over the outputs that it had a part in.
// Which taps these are depends on its row's and its column's remainder by the stride, and a thread
// has pixels of all remainders.
//
// Measured: no, it is not on the ladder.
#define BACKWARD 1
#include "depthwise_fwd.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    backward_data(float *dx, const float *w, const float *dy, int batch) {
    GATHER(dx, dy, w, nullptr, unsigned(batch) * GROUPS);
}
