// The gradient for x as gemm_half.cu has the forward pass.
//
// Measured: no, it is not on the ladder.
#define BACKWARD 1
#define PARTS 1
#include "gemm.cuh"
