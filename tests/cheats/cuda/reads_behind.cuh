// Adds the float beyond its input to its first result.
#include <mxnet/base.h>
#include "honest.cuh"

__global__ void add(float *y, const float *behind) { *y += *behind; }

FORWARD(mshadow::Tensor) {
    convolve(y, x, w);
    add<<<1, 1>>>(y.dptr_, x.dptr_ + x.MSize());
}
