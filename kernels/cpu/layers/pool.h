// Max and average pooling and their gradients, once per instruction set; pool.cpp defines it.
#pragma once

#include "api/builds.h"
#include "api/ece408.h"

namespace ece408 {

struct Pools {
    bool (*forward)(const ece408_windows& rows, const ece408_windows& columns, const float* heights,
                    const float* widths, int64_t planes, const float* x, float* y, int threads);
    bool (*backward)(const ece408_windows& rows, const ece408_windows& columns,
                     const float* heights, const float* widths, int64_t planes, const float* x,
                     const float* y, const float* dy, float* dx, int threads);
};

ECE408_DECLARE_BUILDS(Pools, pool)

}  // namespace ece408
