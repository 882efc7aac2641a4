// What MXNet's own headers say of arrays behind their handles and of its engine, and lib_api.h does not.
#pragma once

#include <cstddef>

namespace ece408 {

// How often MXNet has completed a write to the array of an NDArrayHandle. MXNet counts for all arrays
// that share memory; while one of them is being written the count is not to be relied on.
size_t writes_to(const void* handle);

// Whether the array's memory is not MXNet's own: another library lent it, or processes share it. Whoever
// else writes there is not counted. Views have their array's memory.
bool is_foreign(const void* handle);

// Where MXNet keeps what it is asked of an array: the processor can fetch that of many at once. MXNet
// itself asks for one after the other, each from three places of which one names the next. These may lie
// elsewhere by then; that costs time only.
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

// For MXNet's engine: the first CPU, a ContextHandle, and functions that are run at once where nothing
// is to be waited for, an EngineFnPropertyHandle.
const void* first_cpu();
const void* run_at_once();

}  // namespace ece408
