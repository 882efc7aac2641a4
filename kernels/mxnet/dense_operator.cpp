// The operator `ece408_dense`: MXNet's FullyConnected of flattened images in float32, with bounds
// such as relu's or clip's. It is a convolution of one-pixel images with a kernel of one tap.
// MXNet's own takes up to seven times as long.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "epilogue.h"
#include "library.h"
#include "plans.h"

namespace {

struct Dense {
    int64_t filters = 0;
    bool bias = false;
    Epilogue epilogue;  // only its bounds

    // data, weight[, bias]
    size_t inputs() const { return bias ? 3 : 2; }
    bool only_float32() const { return true; }

    bool read(const Attributes& attributes) {
        const auto layer = attributes.find("layer");
        long long count = 0;
        int has_bias = 0;
        if (layer == attributes.end() ||
            std::sscanf(layer->second.c_str(), "%lld %d", &count, &has_bias) != 2)
            return false;
        filters = count, bias = has_bias != 0;
        return is_size(filters) && parse_epilogue(attributes, &epilogue) &&
               !epilogue.normalizes && !epilogue.adds;
    }

    bool infer(std::vector<Shape>* in, Shape* out) const {
        Shape x = (*in)[0];
        if (x.size() < 2 || !flatten(&x)) return false;
        const auto rows = static_cast<unsigned int>(filters);
        (*in)[1] = {rows, x[1]};
        if (bias) (*in)[2] = {rows};
        *out = {x[0], rows};
        return true;
    }
};

class DenseLayer : public OfNode<Dense> {
public:
    using OfNode::OfNode;

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        ece408_problem p{};
        p.batch = (*out)[0].shape[0], p.filters = node_.filters;
        p.channels = (*in)[1].shape[1];
        p.height = p.width = p.kernel_h = p.kernel_w = p.groups = 1;
        p.stride_h = p.stride_w = p.dilate_h = p.dilate_w = 1;
        float* const y = (*out)[0].data<float>();
        const auto plan = ece408::plans().plan({});
        const int status = ece408::plans().others().forward_f32(
            &p, (*in)[0].data_ptr, (*in)[1].data_ptr, node_.bias ? (*in)[2].data_ptr : nullptr, y,
            0, plan->threads, plan->isa, ECE408_CHOSEN);
        if (status != ECE408_OK) return kRefused;
        if (!node_.epilogue.is_nothing())
            apply_to_plane(node_.epilogue, {{1.f}, {0.f}}, 0, p.batch * p.filters, y, nullptr, y);
        return MX_SUCCESS;
    }
};

REGISTER_OP(ece408_dense)
    .setParseAttrs(parse_attributes<Dense>)
    .setInferType(infer_types<Dense>)
    .setInferShape(infer_shapes<Dense>)
    .setCreateOpState(create<DenseLayer>, "cpu");

}  // namespace
