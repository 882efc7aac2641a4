// The gradient for w as general_strict.cu has the forward pass.
//
// Measured: no, it is not on the ladder.
#define TOTAL double
#include "general_backward_weight.cu"
