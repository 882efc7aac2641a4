// What launching costs: a kernel that does nothing.
// ece408: launch nothing<<<1, 32>>>(y, x, w)

extern "C" __global__ void nothing(float *, const float *, const float *) {}
