// What the operators of this library have in common: MXNet's types, attributes, errors,
// and how MXNet makes them.
#pragma once

#include <mxnet/lib_api.h>

#include <cstdio>
#include <string>
#include <unordered_map>
#include <vector>

#include "epilogue.h"

namespace {

using Attributes = std::unordered_map<std::string, std::string>;
using Shape = std::vector<unsigned int>;
using mxnet::ext::MX_SUCCESS;
using mxnet::ext::MXReturnValue;
using mxnet::ext::MXTensor;

// Without a word: lib_api's MX_ERROR_MSG keeps what it is given for good, and at every later call
// hands MXNet copies of all of it that nobody frees. Who is refused computes with the operator
// written in Python, or has been told by it, and that has words.
constexpr MXReturnValue kRefused = mxnet::ext::MX_FAIL;

inline bool parse_epilogue(const Attributes& attributes, Epilogue* epilogue) {
    const auto normalize = attributes.find("normalize"), bounds = attributes.find("bounds");
    epilogue->adds = attributes.count("adds") != 0;
    if (normalize != attributes.end()) {
        int scaled = 0;
        epilogue->normalizes = true;
        if (std::sscanf(normalize->second.c_str(), "%d %lf", &scaled, &epilogue->epsilon) != 2)
            return false;
        epilogue->scaled = scaled != 0;
    }
    return bounds == attributes.end() ||
           std::sscanf(bounds->second.c_str(), "%f %f", &epilogue->lowest, &epilogue->highest) == 2;
}

// Of gamma, beta, mean and variance, the inputs from number `first` on, if there are any.
inline Affine affine_of(const Epilogue& epilogue, int64_t filters, std::vector<MXTensor>* in,
                        size_t first) {
    const float* parameters[4] = {};
    for (size_t i = 0; epilogue.normalizes && i < 4; i++)
        parameters[i] = (*in)[first + i].data<float>();
    return affine(epilogue, filters, parameters);
}

// MXNet's number for a type that is not known yet; float32, float64 and float16 are 0 to 2.
constexpr int kUnknownType = -1;

inline MXReturnValue infer_types(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
    int common = kUnknownType;
    for (int type : *in) {
        if (type == kUnknownType) continue;
        if (type > mxnet::ext::kFloat16) return kRefused;
        if (common != kUnknownType && type != common) return kRefused;
        common = type;
    }
    in->assign(in->size(), common);
    (*out)[0] = common;
    return MX_SUCCESS;
}

// A Node is what an operator's attributes say: it can `read` them, and then knows how many
// `inputs` there are.
template <typename Node>
MXReturnValue parse_attributes(const Attributes& attributes, int* inputs, int* outputs) {
    Node node;
    if (!node.read(attributes)) return kRefused;
    *inputs = static_cast<int>(node.inputs());
    *outputs = 1;
    return MX_SUCCESS;
}

// An Operator is made of its Node and its inputs' shapes and types.
template <typename Operator>
MXReturnValue create(const Attributes& attributes, const mxnet::ext::MXContext&,
                     const std::vector<Shape>& shapes, const std::vector<int> types,
                     mxnet::ext::CustomStatefulOp** made) {
    typename Operator::Node node;
    if (!node.read(attributes)) return kRefused;
    *made = mxnet::ext::CustomStatefulOp::create<Operator>(node, shapes, types);
    return MX_SUCCESS;
}

}  // namespace
