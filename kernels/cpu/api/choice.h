// Which kernels can compute a problem, and which one does.
#pragma once

#include "api/kernels.h"

namespace ece408 {

#define ECE408_ENUMERATOR(name) name,
enum class KernelName { ECE408_KERNELS(ECE408_ENUMERATOR) };

enum class Direction { forward, backward_data, backward_weight };

// A valid problem, and how it is computed.
struct Task {
    const ece408_problem& problem;
    Direction direction;
    int64_t element_bytes;  // of a factor
    int64_t lanes;          // floats of a vector
    bool strict;            // float32 arrays, single products summed in double
    bool kept;              // the forward pass gets weights that are packed already
};

// Whether a kernel can compute a task.
bool suits(KernelName name, const Task& task);

// The kernel with the smallest estimate. `choose_for_any` considers only kernels that take any
// problem and any weights.
KernelName choose(const Task& task);
KernelName choose_for_any(const Task& task);

}  // namespace ece408
