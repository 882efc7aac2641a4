// The gradient for w as gemm_half.cu has the forward pass.
//
// Measured: no, it is not on the ladder.
#define PARTS 1
#include "gemm_backward_weight.cu"
