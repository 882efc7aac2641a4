// A CPU kernel file of the course to 2019, new-forward.h: mxnet::op::forward of three tensors.
#include ECE408_FILE

#include "entry.h"

namespace {

template <class T>
mshadow::Tensor<mshadow::cpu, 4, T> tensor(T* first, int64_t a, int64_t b, int64_t c, int64_t d) {
    const auto size = [](int64_t n) { return static_cast<mshadow::index_t>(n); };
    return {first, mshadow::Shape4(size(a), size(b), size(c), size(d))};
}

}  // namespace

void ece408_file::compute(const ece408_problem& p, const float* x, const float* w, float* y) {
    // The course's arrays are not const, not even its inputs.
    auto output = tensor(y, p.batch, p.filters, p.height - p.kernel_h + 1, p.width - p.kernel_w + 1);
    const auto input = tensor(const_cast<float*>(x), p.batch, p.channels, p.height, p.width);
    const auto weight =
        tensor(const_cast<float*>(w), p.filters, p.channels, p.kernel_h, p.kernel_w);
    mxnet::op::forward<mshadow::cpu, float>(output, input, weight);
}

extern "C" ECE408_EXPORT int ece408_file_takes_strides(void) { return 0; }
