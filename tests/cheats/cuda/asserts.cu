// Fails an assertion on the GPU.
// ece408: launch convolve<<<1, 1>>>(y)
#include <cassert>

extern "C" __global__ void convolve(float *y) { assert(y == nullptr); }
