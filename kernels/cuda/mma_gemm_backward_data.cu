// The gradient for x as a matrix product on tensor cores by mma.sync, which GPUs since Ampere have.
//
// Measured: no, it is not on the ladder.
#define BY_WARPS
#define DIRECTION 1
#include "direct_gemm.cuh"
