// The forward pass as a matrix product on tensor cores by mma.sync, which GPUs since Ampere have.
//
// Measured: not yet.
#define BY_WARPS
#define DIRECTION 0
#include "direct_gemm.cuh"
