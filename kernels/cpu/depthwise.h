// The fast kernels for groups of one channel, once per instruction set; depthwise.cpp defines them.
#pragma once

#include "direct.h"

namespace ece408 {

ECE408_DECLARE(depthwise)

}  // namespace ece408
