// Writes its results, and some floats beyond them.
#include <mxnet/base.h>
#include "honest.cuh"

__global__ void stray(float *behind) { behind[threadIdx.x] = 1; }

namespace mxnet {
namespace op {

FORWARD(mshadow::Tensor) {
    convolve(y.dptr_, x.dptr_, w.dptr_, x.size(0), y.size(1), x.size(1), x.size(2), x.size(3), w.size(3));
    stray<<<1, 16>>>(y.dptr_ + y.MSize());
}

}  // namespace op
}  // namespace mxnet
