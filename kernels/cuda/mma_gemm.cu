// The forward pass as a matrix product on tensor cores by mma.sync, which GPUs since Ampere have.
//
// Measured: fa19_1 7.80 ms, fa19_2 8.41 ms; batch 10000, NVIDIA H200.
#define BY_WARPS
#define DIRECTION 0
#include "direct_gemm.cuh"
