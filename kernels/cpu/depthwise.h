// The fast kernels for groups of one channel, once per instruction set; depthwise.cpp defines them.
#pragma once

#include "direct.h"

namespace ece408 {

DirectForward depthwise_forward_baseline;
DirectBackward depthwise_backward_data_baseline;
#if defined(__x86_64__)
DirectForward depthwise_forward_avx2;
DirectForward depthwise_forward_avx512;
DirectBackward depthwise_backward_data_avx2;
DirectBackward depthwise_backward_data_avx512;
#endif

}  // namespace ece408
