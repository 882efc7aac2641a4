// The gradient for x of such convolutions.
//
// Measured: no, it is not on the ladder.
#define BACKWARD 1
#include "gemm.cuh"
