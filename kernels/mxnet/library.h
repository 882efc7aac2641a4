// Shared by the operators of this library: MXNet's types, attributes, errors, and the registration
// of operators.
#pragma once

#include <mxnet/lib_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "plans.h"

namespace {

using Attributes = std::unordered_map<std::string, std::string>;
using Shape = std::vector<unsigned int>;
using mxnet::ext::MX_SUCCESS;
using mxnet::ext::MXReturnValue;
using mxnet::ext::MXTensor;

// Without a message: lib_api's MX_ERROR_MSG keeps every text, and each later call copies all of
// them for MXNet, which never frees the copies. After a refusal the operator in Python computes, or
// has already reported the reason.
constexpr MXReturnValue kRefused = mxnet::ext::MX_FAIL;

// Whether this process made the node; a node from a file may have any attributes.
inline bool made_here(const Attributes& attributes) {
    const auto key = attributes.find("key");
    return key != attributes.end() && ece408::plans().made(key->second);
}

// MXNet's number for a type that is not known yet; float32, float64 and float16 are 0 to 2.
constexpr int kUnknownType = -1;

// Larger sizes than MXNet's arrays can have stand for unknown ones.
inline bool is_size(int64_t size) { return size > 0 && size <= INT32_MAX; }

inline bool are_sizes(const Shape& shape) {
    for (unsigned int size : shape)
        if (!is_size(size)) return false;
    return true;
}

// A Node has an operator's attributes: it can `read` them, and then knows its number of `inputs`,
// whether they must be of `only_float32`, and how to `infer` shapes: it completes the inputs' and
// sets the output's, or refuses them.
template <typename Node>
bool read(const Attributes& attributes, Node* node) {
    return made_here(attributes) && node->read(attributes);
}

template <typename Node>
MXReturnValue parse_attributes(const Attributes& attributes, int* inputs, int* outputs) {
    Node node;
    if (!read(attributes, &node)) return kRefused;
    *inputs = static_cast<int>(node.inputs());
    *outputs = 1;
    return MX_SUCCESS;
}

template <typename Node>
bool are_types(const Node& node, std::vector<int>* in, int* out) {
    int common = kUnknownType;
    for (int type : *in) {
        if (type == kUnknownType) continue;
        if (type > (node.only_float32() ? mxnet::ext::kFloat32 : mxnet::ext::kFloat16)) return false;
        if (common != kUnknownType && type != common) return false;
        common = type;
    }
    in->assign(in->size(), common);
    *out = common;
    return true;
}

template <typename Node>
bool are_shapes(const Node& node, std::vector<Shape>* in, Shape* out) {
    return in->size() == node.inputs() && are_sizes((*in)[0]) && node.infer(in, out);
}

template <typename Node>
MXReturnValue infer_types(const Attributes& attributes, std::vector<int>* in,
                          std::vector<int>* out) {
    Node node;
    return read(attributes, &node) && are_types(node, in, &(*out)[0]) ? MX_SUCCESS : kRefused;
}

template <typename Node>
MXReturnValue infer_shapes(const Attributes& attributes, std::vector<Shape>* in,
                           std::vector<Shape>* out) {
    Node node;
    return read(attributes, &node) && are_shapes(node, in, &(*out)[0]) ? MX_SUCCESS : kRefused;
}

// An operator that is described by a Node.
template <typename NodeOf>
class OfNode : public mxnet::ext::CustomStatefulOp {
public:
    using Node = NodeOf;

    OfNode(const Node& node, const std::vector<Shape>&, const std::vector<int>&,
           const mxnet::ext::MXContext&)
        : node_(node) {}

protected:
    const Node node_;
};

// An Operator is made from its Node, its inputs' shapes and types, which are checked once more, and
// its device: from then on its arrays must match.
template <typename Operator>
MXReturnValue create(const Attributes& attributes, const mxnet::ext::MXContext& context,
                     const std::vector<Shape>& shapes, const std::vector<int> types,
                     mxnet::ext::CustomStatefulOp** made) {
    typename Operator::Node node;
    std::vector<Shape> needed = shapes;
    std::vector<int> common = types;
    Shape out_shape;
    int out_type = kUnknownType;
    if (!read(attributes, &node) || !are_types(node, &common, &out_type) || common != types ||
        out_type == kUnknownType || !are_shapes(node, &needed, &out_shape) || needed != shapes)
        return kRefused;
    *made = mxnet::ext::CustomStatefulOp::create<Operator>(node, shapes, types, context);
    return MX_SUCCESS;
}

}  // namespace
