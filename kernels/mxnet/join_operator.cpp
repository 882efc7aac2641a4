// The operator `ece408_join`: arrays (images, channels, ...) side by side along their channels, and
// what `after.h` has of that, in one go. In float32; what networks do between convolutions whose
// arrays are in plain layout, where MXNet's own Concat and BatchNorm are slow.
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "after.h"
#include "library.h"
#include "plans.h"

namespace {

struct Join {
    int count = 0;
    After after;

    size_t inputs() const { return count + (after.normalizes ? 4 : 0); }
};

bool parse(const Attributes& attributes, Join* join) {
    const auto count = attributes.find("count");
    if (count == attributes.end() || std::sscanf(count->second.c_str(), "%d", &join->count) != 1)
        return false;
    return join->count > 0 && parse_after(attributes, &join->after);
}

MXReturnValue parse_attributes(const Attributes& attributes, int* inputs, int* outputs) {
    Join join;
    if (!parse(attributes, &join)) return kRefused;
    *inputs = static_cast<int>(join.inputs());
    *outputs = 1;
    return MX_SUCCESS;
}

// Whether two shapes differ at most in their channels.
bool fits(const Shape& a, const Shape& b) {
    if (a.size() != b.size() || a.size() < 2) return false;
    for (size_t i = 0; i < a.size(); i++)
        if (i != 1 && a[i] != b[i]) return false;
    return true;
}

MXReturnValue infer_shapes(const Attributes& attributes, std::vector<Shape>* in,
                           std::vector<Shape>* out) {
    Join join;
    if (!parse(attributes, &join)) return kRefused;
    Shape joined = (*in)[0];
    if (joined.size() < 2) return kRefused;
    for (int i = 1; i < join.count; i++) {
        if (!fits(joined, (*in)[i])) return kRefused;
        joined[1] += (*in)[i][1];
    }
    for (size_t i = join.count; i < join.inputs(); i++) (*in)[i] = {joined[1]};
    (*out)[0] = joined;
    return MX_SUCCESS;
}

class Joining : public mxnet::ext::CustomStatefulOp {
public:
    explicit Joining(const Join& join) : join_(join) {}

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        const std::vector<int64_t>& shape = (*out)[0].shape;
        const int64_t channels = shape[1];
        const int64_t pixels =
            std::accumulate(shape.begin() + 2, shape.end(), int64_t{1}, std::multiplies<int64_t>());
        const Affine affine = affine_of(join_.after, channels, in, join_.count);
        float* const y = (*out)[0].data<float>();
        const int threads = ece408::plans().threads();
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t plane = 0; plane < shape[0] * channels; plane++) {
            const float* const x = source(*in, plane / channels, plane % channels, pixels);
            if (join_.after.is_nothing())
                std::memcpy(y + plane * pixels, x, pixels * sizeof(float));
            else
                finish_plane(join_.after, affine, plane % channels, pixels, x, nullptr,
                             y + plane * pixels);
        }
        return MX_SUCCESS;
    }

private:
    static const float* source(const std::vector<MXTensor>& in, int64_t image, int64_t channel,
                               int64_t pixels) {
        size_t i = 0;
        while (channel >= in[i].shape[1]) channel -= in[i++].shape[1];
        return static_cast<const float*>(in[i].data_ptr) +
               (image * in[i].shape[1] + channel) * pixels;
    }

    Join join_;
};

MXReturnValue create(const Attributes& attributes, const mxnet::ext::MXContext&,
                     const std::vector<Shape>&, const std::vector<int>,
                     mxnet::ext::CustomStatefulOp** made) {
    Join join;
    if (!parse(attributes, &join)) return kRefused;
    *made = mxnet::ext::CustomStatefulOp::create<Joining>(join);
    return MX_SUCCESS;
}

REGISTER_OP(ece408_join)
    .setParseAttrs(parse_attributes)
    .setInferType(infer_types)
    .setInferShape(infer_shapes)
    .setCreateOpState(create, "cpu");

}  // namespace
