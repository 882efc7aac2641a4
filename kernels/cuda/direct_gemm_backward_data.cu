// The gradient for x as a matrix product that splits its numbers on the way to the tensor cores.
//
// Measured: no, it is not on the ladder.
#define DIRECTION 1
#include "direct_gemm.cuh"
