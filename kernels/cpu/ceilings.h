// Measures of the machine, once per instruction set; ceilings.cpp defines them all.
#pragma once

#include "ece408.h"

namespace ece408 {

struct Ceilings {
    double (*multiply_adds)(int64_t thousands, int threads);
    void (*store_all)(float* to, int64_t floats, int threads);
    void (*read_all)(const float* from, int64_t floats, int threads);
};

extern const Ceilings ceilings_baseline;
#if defined(__x86_64__)
extern const Ceilings ceilings_avx2;
extern const Ceilings ceilings_avx512;
#endif

}  // namespace ece408
