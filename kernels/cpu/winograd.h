// The kernels for stride 1 that multiply less, once per instruction set; winograd.cpp defines them.
#pragma once

#include "ece408.h"

namespace ece408 {

// As ece408_winograd_forward_f32 and ece408_winograd_backward_data_f32, for arrays that are not
// null.
using WinogradForward = int(const ece408_problem& problem, const float* x, const float* w,
                            const float* bias, float* y, bool accumulate, int threads);

using WinogradBackward = int(const ece408_problem& problem, const float* w, const float* dy,
                             float* dx, bool accumulate, int threads);

WinogradForward winograd_forward_baseline;
WinogradBackward winograd_backward_data_baseline;
#if defined(__x86_64__)
WinogradForward winograd_forward_avx2;
WinogradForward winograd_forward_avx512;
WinogradBackward winograd_backward_data_avx2;
WinogradBackward winograd_backward_data_avx512;
#endif

}  // namespace ece408
