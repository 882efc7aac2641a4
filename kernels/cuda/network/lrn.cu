// Normalisation over neighbouring channels: y = x / (KNORM + ALPHA / SIZE * sum of x^2)^BETA.
//
// A thread has an element, and reads the elements of the SIZE channels around it. (A. Krizhevsky
// and others, ImageNet Classification with Deep Convolutional Neural Networks, 2012)
#include "stored.cuh"

#ifndef SIZE
#define SIZE 5
#define ALPHA 1e-4f
#define BETA 0.75f
#define KNORM 2.f
#endif

extern "C" __global__ void __launch_bounds__(256)
    normalise(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, int elements, int channels,
              int plane) {
    const unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (i >= elements) return;
    const int channel = i / plane % channels;
    float sum = 0;
#pragma unroll
    for (int k = -(SIZE / 2); k <= SIZE / 2; k++) {
        if (unsigned(channel + k) < channels) {
            const float value = float(__ldg(x + (long long)i + (long long)k * plane));
            sum += value * value;
        }
    }
    y[i] = Y_TYPE(float(__ldg(x + i)) * powf(KNORM + ALPHA / SIZE * sum, -BETA));
}
