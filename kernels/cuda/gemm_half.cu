// The same products with numbers of 11 bits, as TF32 has: one half of each, a third of the work.
//
// Measured: fa19_1 8.60 ms, fa19_2 4.40 ms; batch 10000, NVIDIA H200.
#define PARTS 1
#include "gemm.cuh"
