// The fast kernels for stride 1, once per instruction set; direct.cpp defines them all.
#pragma once

#include "ece408.h"

namespace ece408 {

// As ece408_direct_forward_f32 and ece408_direct_backward_data_f32, for arrays that are not null.
using DirectForward = int(const ece408_problem& problem, const float* x, const float* w,
                          const float* bias, float* y, bool accumulate, int threads);

using DirectBackward = int(const ece408_problem& problem, const float* w, const float* dy,
                           float* dx, bool accumulate, int threads);

DirectForward direct_forward_baseline;
DirectBackward direct_backward_data_baseline;
#if defined(__x86_64__)
DirectForward direct_forward_avx2;
DirectForward direct_forward_avx512;
DirectBackward direct_backward_data_avx2;
DirectBackward direct_backward_data_avx512;
#endif

}  // namespace ece408
