// The gradient for the bias of any convolution: dbias[m] is the sum of dy over images and pixels.
//
// Each block sums a filter's output over some images, with a tree over its threads' sums; `reduce`
// adds up the blocks' sums in a fixed order. All sums are in double precision, which costs nothing:
// reading dy takes longer.
//
// Measured: no, it is not on the ladder.
#include "general.cuh"

#ifndef BIAS_THREADS
#define BIAS_THREADS 256  // a power of two
#endif

// parts[slice][filter] from `images` images for each slice.
extern "C" __global__ void __launch_bounds__(BIAS_THREADS)
    backward_bias(double *__restrict__ parts, const ELEMENT *__restrict__ dy, int batch,
                  int images) {
    __shared__ double sums[BIAS_THREADS];
    const unsigned filter = blockIdx.x % FILTERS, slice = blockIdx.x / FILTERS;
    const unsigned first = slice * images, count = min(unsigned(images), batch - first);
    double sum = 0;
    for (unsigned n = threadIdx.x; n < count * kOutPlane; n += BIAS_THREADS) {
        const unsigned image = first + n / kOutPlane;
        sum += double(load(dy + (image * FILTERS + filter) * kOutPlane + n % kOutPlane));
    }
    sums[threadIdx.x] = sum;
    for (int half = BIAS_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) parts[slice * FILTERS + filter] = sums[0];
}

extern "C" __global__ void reduce(ELEMENT *__restrict__ dbias, const double *__restrict__ parts,
                                  int slices) {
    const unsigned filter = blockIdx.x * blockDim.x + threadIdx.x;
    if (filter >= FILTERS) return;
    double sum = 0;
    for (int slice = 0; slice < slices; slice++) sum += parts[slice * FILTERS + filter];
    store(dbias + filter, SUM(sum));
}
