// Properties of arrays and of the engine that MXNet's own headers have, but lib_api.h has not.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "callbacks.h"

namespace ece408 {

// MXNet's functions, once Python has passed them.
inline ece408_mxnet of_mxnet{};

// Arrays' types, by MXNet's numbers, each with its number of dimensions, and these.
using Sizes = std::vector<int64_t>;

template <typename Shape>
void add(int type, const Shape& shape, Sizes* sizes) {
    sizes->insert(sizes->end(), {type, static_cast<int64_t>(shape.end() - shape.begin())});
    sizes->insert(sizes->end(), shape.begin(), shape.end());
}

// Adds an array's, and sets the number of its device; false unless it is a dense one in ordinary memory of
// the CPU.
bool add(const void* handle, Sizes* sizes, int* device);

// What `work` returns, on this thread, or 0, without it, if the arrays have pending writes or
// failures. Later writes by MXNet wait for its end.
int at_once(std::vector<void*>& reads, const std::function<int()>& work);

}  // namespace ece408
