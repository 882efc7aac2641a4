// What launching costs: a kernel that does nothing.
#include <mxnet/base.h>

namespace mxnet {
namespace op {

__global__ void nothing() {}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &, const mshadow::Tensor<gpu, 4, float> &,
                         const mshadow::Tensor<gpu, 4, float> &) {
    nothing<<<1, 32>>>();
}

}  // namespace op
}  // namespace mxnet
