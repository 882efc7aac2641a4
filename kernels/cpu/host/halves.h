// Arrays of half precision converted to float and back, by all threads. Instruction sets from AVX2 on
// have instructions for it.
#pragma once

#include <stdint.h>

#include "micro/half.h"

namespace ece408 {

void to_floats(const Half* from, int64_t count, float* to, int threads, int isa);
void to_halves(const float* from, int64_t count, Half* to, int threads, int isa);

}  // namespace ece408
