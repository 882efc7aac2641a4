// Writes to an address that is nobody's, after which the GPU's context is of no more use.
// ece408: launch convolve<<<1, 1>>>(y)

extern "C" __global__ void convolve(float *y) { *(volatile float *)16 = 1; }
