// The operator `ece408_batch_norm`: BatchNorm in training, by the batch's own averages, with an
// optional sum with another array and relu, and its gradients. For float32 arrays (images,
// channels, ...) in plain layout, for which MXNet's own operator takes four times as long as in
// oneDNN's blocked layout.
//
// Like MXNet's, it updates the moving averages in the backward pass. MXNet must therefore know that
// this pass writes to inputs, but it asks a library's operator for the mutable inputs of the
// forward pass only. It registers the backward pass as a separate operator with the prefix
// `_backward_`, and a second registration of an operator changes the first. So this file registers
// the backward pass again, with its mutable inputs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "library.h"
#include "plans.h"

namespace {

using ece408::plans;

// data, gamma, beta, moving mean, moving variance[, what is added] -> y, mean, 1 / deviation.
constexpr size_t kParameters = 5, kOutputs = 3;

struct BatchNorm {
    double epsilon = 0;
    float momentum = 0;
    bool scaled = false;  // by gamma, else by 1
    bool adds = false, is_relu = false;

    size_t inputs() const { return kParameters + (adds ? 1 : 0); }

    bool read(const Attributes& attributes) {
        const auto normalize = attributes.find("normalize");
        if (normalize == attributes.end()) return false;
        unsigned long long epsilon_bits = 0;
        unsigned int momentum_bits = 0;
        int is_scaled = 0;
        if (std::sscanf(normalize->second.c_str(), "%d %llu %u", &is_scaled, &epsilon_bits,
                        &momentum_bits) != 3)
            return false;
        scaled = is_scaled != 0;
        epsilon = with_bits_of<double>(static_cast<uint64_t>(epsilon_bits));
        momentum = with_bits_of<float>(uint32_t{momentum_bits});
        adds = attributes.count("adds") != 0;
        is_relu = attributes.count("relu") != 0;
        return true;
    }
};

using Types = std::vector<int>;

MXReturnValue parse_forward(const Attributes& attributes, int* inputs, int* outputs) {
    BatchNorm node;
    if (!read(attributes, &node)) return kRefused;
    *inputs = static_cast<int>(node.inputs());
    *outputs = kOutputs;
    return MX_SUCCESS;
}

// Its inputs are the gradients for the outputs, the inputs, and the outputs.
MXReturnValue parse_backward(const Attributes& attributes, int* inputs, int* outputs) {
    const MXReturnValue status = parse_forward(attributes, outputs, inputs);
    *inputs = 2 * *inputs + *outputs;
    return status;
}

MXReturnValue infer_types(const Attributes&, Types* in, Types* out) {
    for (Types* types : {in, out}) {
        for (int& type : *types) {
            if (type != kUnknownType && type != mxnet::ext::kFloat32) return kRefused;
            type = mxnet::ext::kFloat32;
        }
    }
    return MX_SUCCESS;
}

// Sets the shapes of `count` arrays, from array `first` of the forward pass on: the first one and
// the summand are data, all others have a number for each channel.
void set_shapes(std::vector<Shape>* shapes, size_t first, size_t count, const Shape& data) {
    for (size_t i = 0; i < count; i++)
        (*shapes)[first + i] = i == 0 || i == kParameters ? data : Shape{data[1]};
}

MXReturnValue infer_forward(const Attributes& attributes, std::vector<Shape>* in,
                            std::vector<Shape>* out) {
    BatchNorm node;
    const Shape data = (*in)[0];
    if (!read(attributes, &node) || data.size() < 2 || !are_sizes(data)) return kRefused;
    set_shapes(in, 0, node.inputs(), data);
    set_shapes(out, 0, kOutputs, data);
    return MX_SUCCESS;
}

MXReturnValue infer_backward(const Attributes& attributes, std::vector<Shape>* in,
                             std::vector<Shape>* out) {
    BatchNorm node;
    const Shape data = (*in)[kOutputs];
    if (!read(attributes, &node) || data.size() < 2 || !are_sizes(data)) return kRefused;
    set_shapes(in, 0, kOutputs, data);
    set_shapes(in, kOutputs, node.inputs(), data);
    set_shapes(in, kOutputs + node.inputs(), kOutputs, data);
    set_shapes(out, 0, node.inputs(), data);
    return MX_SUCCESS;
}

MXReturnValue moving_forward(const Attributes&, std::vector<int>* inputs) {
    *inputs = {3, 4};
    return MX_SUCCESS;
}

MXReturnValue moving_backward(const Attributes&, std::vector<int>* inputs) {
    *inputs = {kOutputs + 3, kOutputs + 4};
    return MX_SUCCESS;
}

ece408_batch batch_of(const BatchNorm& node, const MXTensor& data) {
    ece408_batch batch{data.shape[0], data.shape[1], 1, node.epsilon, node.is_relu};
    for (size_t i = 2; i < data.shape.size(); i++) batch.pixels *= data.shape[i];
    return batch;
}

MXReturnValue done(int status) { return status == ECE408_OK ? MX_SUCCESS : kRefused; }

MXReturnValue forward(const Attributes& attributes, std::vector<MXTensor>* in,
                      std::vector<MXTensor>* out, const mxnet::ext::OpResource&) {
    BatchNorm node;
    if (!read(attributes, &node)) return kRefused;
    const ece408_batch batch = batch_of(node, (*in)[0]);
    const auto plan = plans().plan({});
    const float* const added = node.adds ? in->back().data<float>() : nullptr;
    float* const gamma = (*in)[1].data<float>();
    // As MXNet's operator does.
    if (!node.scaled) std::fill_n(gamma, batch.channels, 1.f);
    return done(plans().others().batch_norm_forward(
        &batch, (*in)[0].data<float>(), added, gamma, (*in)[2].data<float>(),
        (*out)[0].data<float>(), (*out)[1].data<float>(), (*out)[2].data<float>(), plan->threads,
        plan->isa));
}

// Mixes the moving averages with this batch's.
void move_averages(const BatchNorm& node, int64_t channels, const float* mean, const float* inverse,
                   float* moving_mean, float* moving_variance) {
    const float rest = 1 - node.momentum;
    for (int64_t c = 0; c < channels; c++) {
        const double deviation = inverse[c] == 0 ? 0.0 : 1.0 / inverse[c];
        const auto variance = static_cast<float>(deviation * deviation - node.epsilon);
        moving_mean[c] = moving_mean[c] * node.momentum + mean[c] * rest;
        moving_variance[c] = moving_variance[c] * node.momentum + variance * rest;
    }
}

MXReturnValue backward(const Attributes& attributes, std::vector<MXTensor>* in,
                       std::vector<MXTensor>* out, const mxnet::ext::OpResource&) {
    BatchNorm node;
    if (!read(attributes, &node)) return kRefused;
    MXTensor* const inputs = in->data() + kOutputs;
    MXTensor* const outputs = inputs + node.inputs();
    const ece408_batch batch = batch_of(node, inputs[0]);
    const auto plan = plans().plan({});
    const float *const mean = outputs[1].data<float>(), *const inverse = outputs[2].data<float>();
    float* const dgamma = (*out)[1].data<float>();
    const int status = plans().others().batch_norm_backward(
        &batch, inputs[0].data<float>(), outputs[0].data<float>(), (*in)[0].data<float>(),
        inputs[1].data<float>(), mean, inverse, (*out)[0].data<float>(),
        node.adds ? out->back().data<float>() : nullptr, dgamma, (*out)[2].data<float>(),
        plan->threads, plan->isa);
    if (!node.scaled) std::fill_n(dgamma, batch.channels, 0.f);
    // Averages have no gradients.
    for (size_t i = 3; i < kParameters; i++)
        std::fill_n((*out)[i].data<float>(), batch.channels, 0.f);
    if (status == ECE408_OK)
        move_averages(node, batch.channels, mean, inverse, inputs[3].data<float>(),
                      inputs[4].data<float>());
    return done(status);
}

REGISTER_OP(ece408_batch_norm)
    .setParseAttrs(parse_forward)
    .setInferType(infer_types)
    .setInferShape(infer_forward)
    .setMutateInputs(moving_forward)
    .setForward(forward, "cpu")
    .setBackward(backward, "cpu");

REGISTER_OP(_backward_ece408_batch_norm)
    .setParseAttrs(parse_backward)
    .setInferType(infer_types)
    .setInferShape(infer_backward)
    .setMutateInputs(moving_backward)
    .setForward(backward, "cpu");

}  // namespace

// In the place of lib_api's (setup.py), which allocates the numbers each time. MXNet asks whenever it lists a
// graph's inputs, copies the numbers at once, and never frees them.
int _opCallMutateInputs(mxnet::ext::mutateInputs_t mutate, const char* const* keys,
                        const char* const* values, int count, int** numbers, int* size) {
    thread_local std::vector<int> found;
    Attributes attributes;
    for (int i = 0; i < count; i++) attributes[keys[i]] = values[i];
    const MXReturnValue status = mutate(attributes, &found);
    *numbers = found.data();
    *size = static_cast<int>(found.size());
    return status;
}
