// The operator `ece408_concat`: concatenates float32 arrays (images, channels, ...) along their
// channels, with the epilogue of `epilogue.h`. In plain layout MXNet's own Concat and BatchNorm are
// slow.
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "../cpu/host/pages.h"
#include "epilogue.h"
#include "library.h"
#include "plans.h"

namespace {

struct Concat {
    int count = 0;
    Epilogue epilogue;

    size_t inputs() const { return count + (epilogue.normalizes ? 4 : 0); }

    bool only_float32() const { return true; }

    bool read(const Attributes& attributes) {
        const auto given = attributes.find("count");
        if (given == attributes.end() || std::sscanf(given->second.c_str(), "%d", &count) != 1)
            return false;
        return count > 0 && parse_epilogue(attributes, &epilogue) && !epilogue.adds;
    }

    bool infer(std::vector<Shape>* in, Shape* out) const;
};

// Whether two shapes differ at most in their channels.
bool fits(const Shape& a, const Shape& b) {
    if (a.size() != b.size() || a.size() < 2) return false;
    for (size_t i = 0; i < a.size(); i++)
        if (i != 1 && a[i] != b[i]) return false;
    return true;
}

bool Concat::infer(std::vector<Shape>* in, Shape* out) const {
    Shape whole = (*in)[0];
    int64_t channels = 0;
    for (int i = 0; i < count; i++) {
        if (!fits(whole, (*in)[i]) || !are_sizes((*in)[i])) return false;
        channels += (*in)[i][1];
    }
    if (!is_size(channels)) return false;
    whole[1] = static_cast<unsigned int>(channels);
    for (size_t i = count; i < inputs(); i++) (*in)[i] = {whole[1]};
    *out = whole;
    return !epilogue.is_flat || flatten(out);
}

class Concatenation : public OfNode<Concat> {
public:
    using OfNode::OfNode;

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        std::vector<int64_t> shape = (*in)[0].shape;
        for (int i = 1; i < node_.count; i++) shape[1] += (*in)[i].shape[1];
        const int64_t channels = shape[1];
        const int64_t pixels =
            std::accumulate(shape.begin() + 2, shape.end(), int64_t{1}, std::multiplies<int64_t>());
        const Affine affine = affine_of(node_.epilogue, channels, in, node_.count);
        float* const y = (*out)[0].data<float>();
        if (node_.epilogue.is_nothing() && lie_side_by_side(*in, y)) return MX_SUCCESS;
        ask_for_huge_pages(y, shape[0] * channels * pixels * int64_t{4});
        const int threads = ece408::plans().threads();
        ece408::plans().parallel_for(threads, shape[0] * channels, [&](int64_t begin, int64_t end) {
            for (int64_t plane = begin; plane < end; plane++) {
                const float* const x = source(*in, plane / channels, plane % channels, pixels);
                float* const to = y + plane * pixels;
                if (!node_.epilogue.is_nothing())
                    apply_to_plane(node_.epilogue, affine, plane % channels, pixels, x, nullptr, to);
                else if (x != to)
                    std::memcpy(to, x, pixels * sizeof(float));
            }
        });
        return MX_SUCCESS;
    }

private:
    // Whether the inputs are already in the output, as a sequence may place them, so that nothing
    // is copied.
    static bool lie_side_by_side(const std::vector<MXTensor>& in, const float* y) {
        for (const MXTensor& each : in) {
            if (each.data_ptr != y || each.shape[0] != 1) return false;
            y += each.size();
        }
        return true;
    }

    static const float* source(const std::vector<MXTensor>& in, int64_t image, int64_t channel,
                               int64_t pixels) {
        size_t i = 0;
        while (channel >= in[i].shape[1]) channel -= in[i++].shape[1];
        return static_cast<const float*>(in[i].data_ptr) +
               (image * in[i].shape[1] + channel) * pixels;
    }
};

REGISTER_OP(ece408_concat)
    .setParseAttrs(parse_attributes<Concat>)
    .setInferType(infer_types<Concat>)
    .setInferShape(infer_shapes<Concat>)
    .setCreateOpState(create<Concatenation>, "cpu");

}  // namespace
