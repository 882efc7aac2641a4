// Never returns.
// ece408: launch convolve<<<1, 1>>>(y)

extern "C" __global__ void convolve(float *y) {
    volatile float *first = y;
    while (*first != 1) {
    }
}
