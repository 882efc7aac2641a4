// The gradient for w as a matrix product that splits its numbers on the way to the tensor cores.
//
// Measured: no, it is not on the ladder.
#define DIRECTION 2
#include "direct_gemm.cuh"
