// Ceilings of the machine, once per instruction set; ceilings.cpp defines them.
#pragma once

#include "api/builds.h"
#include "api/ece408.h"

namespace ece408 {

struct Ceilings {
    double (*multiply_adds)(int64_t thousands, int threads);
    void (*store_all)(float* to, int64_t floats, int threads);
    void (*read_all)(const float* from, int64_t floats, int threads);
};

ECE408_DECLARE_BUILDS(Ceilings, ceilings)

}  // namespace ece408
