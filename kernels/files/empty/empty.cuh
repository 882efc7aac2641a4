// An empty kernel. ece408 lab time subtracts its launch time.
#include <mxnet/base.h>

namespace mxnet {
namespace op {

__global__ void empty() {}

template <>
void forward<gpu, float>(mshadow::Tensor<gpu, 4, float> &, const mshadow::Tensor<gpu, 4, float> &,
                         const mshadow::Tensor<gpu, 4, float> &) {
    empty<<<1, 32>>>();
}

}  // namespace op
}  // namespace mxnet
