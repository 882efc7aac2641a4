// Every convolution of groups of several channels as a matrix product, at float32 accuracy.
//
// Measured: not yet.
#include "gemm.cuh"
