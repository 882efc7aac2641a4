// The operator `ece408_network`: in Symbols and their files, a part of a graph for the GPU. The node
// holds the part as a subgraph, from which MXNet infers shapes and types. It never runs: Python binds
// other graphs in the place of one that has such nodes.
#include <vector>

#include "library.h"

namespace {

class Part : public mxnet::ext::CustomStatefulOp {
public:
    MXReturnValue Forward(std::vector<MXTensor>*, std::vector<MXTensor>*,
                          const mxnet::ext::OpResource&) override {
        return kRefused;
    }

    MXReturnValue Backward(std::vector<MXTensor>*, std::vector<MXTensor>*,
                           const mxnet::ext::OpResource&) override {
        return kRefused;
    }
};

// An executor of such a graph has the arrays that its users know.
MXReturnValue create_part(const Attributes&, const mxnet::ext::MXContext&, const std::vector<Shape>&,
                          const std::vector<int>, mxnet::ext::CustomStatefulOp** made) {
    *made = mxnet::ext::CustomStatefulOp::create<Part>();
    return MX_SUCCESS;
}

REGISTER_OP(ece408_network).setIsSubgraphOp().setCreateOpState(create_part, "cpu");

}  // namespace
