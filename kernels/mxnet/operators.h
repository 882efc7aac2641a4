// This library's operators by name, as MXNet would make them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "library.h"

namespace ece408 {

using mxnet::ext::CustomOp;
using mxnet::ext::CustomStatefulOp;

// One of the operators, or null.
inline const CustomOp* operator_named(const std::string& name) {
    auto* const all = mxnet::ext::Registry<CustomOp>::get();
    for (int i = 0; i < all->size(); i++)
        if (name == all->get(i).name) return &all->get(i);
    return nullptr;
}

// Made for float32 arrays of these shapes; null if it refuses.
inline std::unique_ptr<CustomStatefulOp> make_operator(const CustomOp& op,
                                                       const Attributes& attributes,
                                                       const mxnet::ext::MXContext& context,
                                                       const std::vector<Shape>& in) {
    const std::vector<int> types(in.size(), mxnet::ext::kFloat32);
    CustomStatefulOp* made = nullptr;
    for (size_t i = 0; i < op.create_op_ctx_cstr.size() && !made; i++)
        if (context.dev_type == op.create_op_ctx_cstr[i] &&
            op.create_op_fp[i](attributes, context, in, types, &made) != MX_SUCCESS)
            return nullptr;
    return std::unique_ptr<CustomStatefulOp>(made);
}

// An array whose address changes with each call.
inline MXTensor tensor(const Shape& shape, const mxnet::ext::MXContext& context) {
    return MXTensor(nullptr, {shape.begin(), shape.end()}, mxnet::ext::kFloat32, 0, context);
}

}  // namespace ece408
