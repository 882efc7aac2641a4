// The gradient for w as a matrix product on tensor cores by mma.sync, which GPUs since Ampere have.
//
// Measured: no, it is not on the ladder.
#define BY_WARPS
#define DIRECTION 2
#include "direct_gemm.cuh"
