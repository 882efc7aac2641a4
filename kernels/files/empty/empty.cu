// An empty kernel. ece408 lab time subtracts the time of launching it.
// ece408: launch empty<<<1, 32>>>(y, x, w)

extern "C" __global__ void empty(float *, const float *, const float *) {}
