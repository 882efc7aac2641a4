// Properties of arrays and of the engine that MXNet's own headers have, but lib_api.h has not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ece408 {

// The number of completed writes to the array of an NDArrayHandle. MXNet counts for all arrays in
// the same memory; during a write, the count is not reliable.
size_t writes_to(const void* handle);

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

// For MXNet's engine: the first CPU, a ContextHandle, and the property of functions that run at
// once if they need not wait, an EngineFnPropertyHandle.
const void* first_cpu();
const void* run_at_once();

}  // namespace ece408
