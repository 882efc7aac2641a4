// The fast kernels for stride 1, once per instruction set; direct.cpp defines them all.
#pragma once

#include "ece408.h"

namespace ece408 {

// As ece408_direct_forward_f32 and ece408_direct_backward_data_f32, for arrays that are not null.
using DirectForward = int(const ece408_problem& problem, const float* x, const float* w,
                          const float* bias, float* y, bool accumulate, int threads);

using DirectBackward = int(const ece408_problem& problem, const float* w, const float* dy,
                           float* dx, bool accumulate, int threads);

#define ECE408_DECLARE_BUILD(kernel, isa) \
    DirectForward kernel##_forward_##isa; \
    DirectBackward kernel##_backward_data_##isa;

#if defined(__x86_64__)
#define ECE408_DECLARE(kernel)             \
    ECE408_DECLARE_BUILD(kernel, baseline) \
    ECE408_DECLARE_BUILD(kernel, avx2)     \
    ECE408_DECLARE_BUILD(kernel, avx512)
#else
#define ECE408_DECLARE(kernel) ECE408_DECLARE_BUILD(kernel, baseline)
#endif

ECE408_DECLARE(direct)

}  // namespace ece408
