// Properties of arrays and of the engine that MXNet's own headers have, but lib_api.h has not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ece408 {

// The number of completed writes to the array of an NDArrayHandle. MXNet counts for all arrays in
// the same memory; during a write, the count is not reliable.
size_t writes_to(const void* handle);

// Whether another library lent the array's memory, or processes have it in common. MXNet does not
// count their writes. Views have their array's memory.
bool is_foreign(const void* handle);

// An array's type, by MXNet's number, its number of dimensions, and these.
using Sizes = std::vector<int64_t>;

template <typename Shape>
Sizes sizes_of(int type, const Shape& shape) {
    Sizes sizes{type, static_cast<int64_t>(shape.size())};
    sizes.insert(sizes.end(), shape.begin(), shape.end());
    return sizes;
}

// Sets an array's sizes and the number of its device; false unless it is a dense one in ordinary
// memory of the CPU.
bool describe(const void* handle, Sizes* sizes, int* device);

// Addresses of the fields that MXNet reads for an array, so that the processor can fetch those of
// many arrays at once. MXNet reads one array after the other, each by three dependent loads. An
// outdated address costs time only.
struct ArrayPlaces {
    const char* array = nullptr;
    const char* chunk = nullptr;
    const char* variable = nullptr;

    void fetch() const {
        constexpr int kLine = 64;
        __builtin_prefetch(array);
        for (int line = 0; line < 3; line++) __builtin_prefetch(chunk + line * kLine);
        for (int line = 0; line < 2; line++) __builtin_prefetch(variable + line * kLine);
    }
};

ArrayPlaces places_of(const void* handle);

// For MXNet's engine: the first CPU, a ContextHandle, and the property of functions that run at
// once if they need not wait, an EngineFnPropertyHandle.
const void* first_cpu();
const void* run_at_once();

}  // namespace ece408
