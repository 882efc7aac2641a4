// Which kernels can compute a problem, and which one does.
#pragma once

#include "api/kernels.h"

namespace ece408 {

#define ECE408_ENUMERATOR(name) name,
enum class KernelName { ECE408_KERNELS(ECE408_ENUMERATOR) };

enum class Direction { forward, backward_data, backward_weight };

// A valid problem, and what it is computed with.
struct Task {
    const ece408_problem& problem;
    Direction direction;
    int64_t element_bytes;  // of a number as it is multiplied
    int64_t lanes;          // floats of a vector
    bool strict;            // float32 arrays, products and sums in double, all taken as they are
    bool kept;              // the forward pass is given weights that are packed already
};

// Whether a kernel can compute a task.
bool suits(KernelName name, const Task& task);

// The kernel that is expected to be the fastest: of all, and of those that are for any problem and
// any weights.
KernelName choose(const Task& task);
KernelName choose_for_any(const Task& task);

}  // namespace ece408
