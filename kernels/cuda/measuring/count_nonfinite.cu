// Not a convolution: counts the elements of y that are infinite or NaN, for benchmarks, which fill
// outputs with NaN first. `count` must be 0 before.
extern "C" __global__ void count_nonfinite(unsigned *__restrict__ count,
                                           const float *__restrict__ y, unsigned elements) {
    unsigned mine = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < elements;
         i += gridDim.x * blockDim.x) {
        mine += !isfinite(y[i]);
    }
    if (mine > 0) atomicAdd(count, mine);
}
