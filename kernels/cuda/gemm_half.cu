// The same products with numbers of 11 bits, as TF32 has: one half of each, a third of the work.
//
// Measured: not yet.
#define PARTS 1
#include "gemm.cuh"
