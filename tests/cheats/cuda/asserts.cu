// Says on the GPU that something is not as it should be.
// ece408: launch convolve<<<1, 1>>>(y)
#include <cassert>

extern "C" __global__ void convolve(float *y) { assert(y == nullptr); }
