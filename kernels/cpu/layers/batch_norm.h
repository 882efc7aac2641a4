// Batch normalisation, once per instruction set; batch_norm.cpp defines it.
#pragma once

#include "api/builds.h"
#include "api/ece408.h"

namespace ece408 {

struct BatchNorm {
    void (*forward)(const ece408_batch& batch, const float* x, const float* added,
                    const float* gamma, const float* beta, float* y, float* mean, float* inverse,
                    int threads);
    void (*backward)(const ece408_batch& batch, const float* x, const float* y, const float* dy,
                     const float* gamma, const float* mean, const float* inverse, float* dx,
                     float* dadded, float* dgamma, float* dbeta, int threads);
};

ECE408_DECLARE_BUILDS(BatchNorm, batch_norm)

}  // namespace ece408
