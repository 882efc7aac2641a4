// The forward pass as a matrix product that splits its numbers on the way to the tensor cores.
//
// Measured: not yet.
#define DIRECTION 0
#include "direct_gemm.cuh"
