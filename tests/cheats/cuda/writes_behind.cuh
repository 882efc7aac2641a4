// Writes its results, and some floats beyond them.
#include <mxnet/base.h>
#include "honest.cuh"

__global__ void stray(float *behind) { behind[threadIdx.x] = 1; }

namespace mxnet {
namespace op {

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &y, const mshadow::Tensor<gpu, 4, float> &x,
                         const mshadow::Tensor<gpu, 4, float> &w) {
    convolve(y.dptr_, x.dptr_, w.dptr_, x.size(0), y.size(1), x.size(1), x.size(2), x.size(3), w.size(3));
    stray<<<1, 16>>>(y.dptr_ + y.MSize());
}

}  // namespace op
}  // namespace mxnet
