// The gradient for w of convolutions whose groups have few channels and few filters.
//
// Measured: no, it is not on the ladder.
#ifndef GROUP_IN
#define GROUP_IN 4
#define GROUP_OUT 4
#define THREADS 256
#endif
#include "depthwise_backward_weight.cu"
