// The gradient for x of 1x1 kernels and few filters, in float32 arithmetic.
//
// Measured: no, it is not on the ladder.
#define DIRECTION 1
#include "short_sums.cuh"
