// The kernels for stride 1 that multiply less, once per instruction set; winograd.cpp defines them.
#pragma once

#include "direct.h"

namespace ece408 {

DirectForward winograd_forward_baseline;
DirectBackward winograd_backward_data_baseline;
#if defined(__x86_64__)
DirectForward winograd_forward_avx2;
DirectForward winograd_forward_avx512;
DirectBackward winograd_backward_data_avx2;
DirectBackward winograd_backward_data_avx512;
#endif

}  // namespace ece408
