// The gradient for x of convolutions whose groups have one channel and one filter: dx from w and
// dy.
//
// As depthwise.cu, with dy as the input: a pixel's sum is over the outputs that read it. Its row's
// and column's remainders by the stride select the taps; each thread has pixels of all remainders.
//
// Measured: no, it is not on the ladder.
#define BACKWARD 1
#include "depthwise_fwd.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    backward_data(float *__restrict__ dx, const float *__restrict__ w, const float *__restrict__ dy,
                  int batch) {
    GATHER(dx, dy, w, nullptr, unsigned(batch) * GROUPS);
}
