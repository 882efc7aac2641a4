// The forward pass of 1x1 kernels and few channels, in float32 arithmetic.
//
// Measured: not yet.
#define DIRECTION 0
#include "short_sums.cuh"
