// Writes zeros, a fast result.
// ece408: launch clear<<<1024, 256>>>(y, B * M * OH * OW)

extern "C" __global__ void clear(float *y, int size) {
    for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < size; n += gridDim.x * blockDim.x) y[n] = 0;
}
