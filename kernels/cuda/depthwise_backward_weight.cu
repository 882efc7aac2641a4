// The gradient for w of convolutions whose groups have one channel and one filter.
//
// Measured: no, it is not on the ladder.
#include "depthwise_weight.cuh"
