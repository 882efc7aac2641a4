// Writes to an invalid address, which makes the GPU's context unusable.
// ece408: launch convolve<<<1, 1>>>(y)

extern "C" __global__ void convolve(float *y) { *(volatile float *)16 = 1; }
