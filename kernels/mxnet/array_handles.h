// What MXNet's own headers say of an array behind its handle, and lib_api.h does not.
#pragma once

#include <cstddef>

namespace ece408 {

// How often MXNet has completed a write to the array of an NDArrayHandle. MXNet counts for all arrays
// that share memory; while one of them is being written the count is not to be relied on.
size_t writes_to(const void* handle);

}  // namespace ece408
