// Adds the float beyond its input to its first result.
#include <mxnet/base.h>
#include "honest.cuh"

__global__ void add(float *y, const float *behind) { *y += *behind; }

namespace mxnet {
namespace op {

FORWARD(mshadow::Tensor) {
    convolve(y.dptr_, x.dptr_, w.dptr_, x.size(0), y.size(1), x.size(1), x.size(2), x.size(3), w.size(3));
    add<<<1, 1>>>(y.dptr_, x.dptr_ + x.MSize());
}

}  // namespace op
}  // namespace mxnet
