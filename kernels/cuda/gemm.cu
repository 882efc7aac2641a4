// Every convolution of groups of several channels as a matrix product, at float32 accuracy.
//
// Measured: no, it is not on the ladder.
#include "gemm.cuh"
