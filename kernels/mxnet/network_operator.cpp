// The operator `ece408_network`: all or part of a graph as one node. The node holds the part as a
// subgraph, from which MXNet infers shapes and types; Python makes a network from it, and computes
// it on the GPU.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "callbacks.h"
#include "library.h"
#include "owners.h"
#include "python_calls.h"
#include "versions.h"

namespace {

using ece408::described;

ece408_network_open* open_network = nullptr;
ece408_network_compute* compute_network = nullptr;
ece408_network_close* close_network = nullptr;

// A network made by Python, and the versions of its parameters.
class Network {
public:
    // `inputs` has a character for each input.
    Network(int number, const std::string& inputs)
        : number_(number), inputs_(inputs), versions_(inputs) {}

    Network(const Network&) = delete;

    ~Network() {
        ece408::run_python([this] { return close_network(number_); });
    }

    bool compute(const std::vector<MXTensor>& in, const std::vector<MXTensor>& out) {
        if (in.size() != inputs_.size()) return false;
        std::vector<ece408_array> data, parameters, results;
        for (size_t i = 0; i < in.size(); i++) {
            auto& arrays = inputs_[i] == ECE408_DATA ? data : parameters;
            arrays.push_back(described(in[i], versions_.of(i, in[i])));
        }
        for (const MXTensor& array : out) results.push_back(described(array, 0));
        return ece408::run_python([&] {
            return compute_network(number_, data.size(), data.data(), parameters.size(),
                                   parameters.data(), results.size(), results.data());
        }) != 0;
    }

private:
    int number_;
    std::string inputs_;
    ece408::Versions versions_;
};

// Never destroyed: MXNet's threads may still be running when the process ends.
ece408::Owners<Network>& owners() {
    static auto* const all = new ece408::Owners<Network>;
    return *all;
}

std::string text(const Attributes& attributes, const char* name) {
    const auto found = attributes.find(name);
    return found == attributes.end() ? "" : found->second;
}

class Part : public mxnet::ext::CustomStatefulOp {
public:
    explicit Part(std::shared_ptr<Network> network) : network_(std::move(network)) {}

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        return network_->compute(*in, *out) ? MX_SUCCESS : kRefused;
    }

    // Graphs with such a node never run with gradients.
    MXReturnValue Backward(std::vector<MXTensor>*, std::vector<MXTensor>*,
                           const mxnet::ext::OpResource&) override {
        return kRefused;
    }

private:
    std::shared_ptr<Network> network_;
};

MXReturnValue create_part(const Attributes& attributes, const mxnet::ext::MXContext&,
                          const std::vector<Shape>& shapes, const std::vector<int>,
                          mxnet::ext::CustomStatefulOp** made) {
    const std::string owner = text(attributes, "owner");
    std::shared_ptr<Network> network = owners().find(owner);
    if (!network) {
        const std::string graph = text(attributes, MX_STR_SUBGRAPH_SYM_JSON);
        std::string inputs = text(attributes, "parameters");
        const std::string unread = text(attributes, "unread") + " " + text(attributes, "machine");
        inputs.resize(shapes.size(), ECE408_DATA);
        std::vector<int64_t> dimensions, first_sizes;
        for (const Shape& shape : shapes) {
            dimensions.push_back(static_cast<int64_t>(shape.size()));
            first_sizes.push_back(shape.empty() ? 0 : shape[0]);
        }
        const int number = ece408::ask_python([&] {
            return open_network ? open_network(graph.c_str(), &inputs[0], dimensions.data(),
                                               first_sizes.data(), unread.c_str())
                                : 0;
        });
        if (number == 0) return kRefused;
        network = owners().keep(owner, std::make_shared<Network>(number, inputs));
    }
    *made = mxnet::ext::CustomStatefulOp::create<Part>(network);
    return MX_SUCCESS;
}

REGISTER_OP(ece408_network).setIsSubgraphOp().setCreateOpState(create_part, "cpu");

}  // namespace

void ece408_network_use(ece408_network_open* open, ece408_network_compute* compute,
                        ece408_network_close* close) {
    open_network = open;
    compute_network = compute;
    close_network = close;
}

void ece408_network_own(const char* owner) { owners().own(owner); }

void ece408_network_release(const char* owner) { owners().release(owner); }
