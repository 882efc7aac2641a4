// Ends its kernel with a trap.
// ece408: launch convolve<<<1, 1>>>(y)

extern "C" __global__ void convolve(float *y) { __trap(); }
