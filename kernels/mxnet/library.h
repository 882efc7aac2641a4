// Shared by the operators of this library: MXNet's types, attributes and errors.
#pragma once

#include <mxnet/lib_api.h>

#include <algorithm>
#include <cstdint>
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

inline MXReturnValue success_if(bool is_done) { return is_done ? MX_SUCCESS : kRefused; }

// The value of an attribute, or nothing if this process did not make the node: one from a file may
// have any attributes.
inline std::string value_of(const char* name, const Attributes& attributes) {
    const auto key = attributes.find("key"), found = attributes.find(name);
    if (key == attributes.end() || !ece408::plans().made(key->second)) return "";
    return found == attributes.end() ? "" : found->second;
}

// MXNet's number for a type that is not known yet; float32, float64 and float16 are 0 to 2.
constexpr int kUnknownType = -1;

// Larger sizes than MXNet's arrays can have stand for unknown ones.
inline bool is_size(int64_t size) { return size > 0 && size <= INT32_MAX; }

inline bool are_sizes(const Shape& shape) {
    return std::all_of(shape.begin(), shape.end(), is_size);
}

}  // namespace
