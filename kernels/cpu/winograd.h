// The kernels for stride 1 that multiply less, once per instruction set; winograd.cpp defines them.
#pragma once

#include "direct.h"

namespace ece408 {

ECE408_DECLARE(winograd)

}  // namespace ece408
