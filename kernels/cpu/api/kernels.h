// The fast kernels: their list, and what each has for every instruction set.
#pragma once

#include "api/builds.h"
#include "api/ece408.h"
#include "micro/half.h"

// Every kernel, in the order of its number in ece408.h's functions.
#define ECE408_KERNELS(EACH)       \
    EACH(direct)                   \
    EACH(winograd)                 \
    EACH(depthwise)                \
    EACH(conv_fwd_ow)          \
    EACH(conv_fwd_oc)         \
    EACH(conv_fwd_oc_f23_1d)   \
    EACH(conv_fwd_oc_f23_2d) \
    EACH(im2col)                  \
    EACH(conv_bwd_w_dot)              \
    EACH(conv_bwd_w_ic)

namespace ece408 {

// A kernel's functions for one type, null for directions that it does not have. They take arrays
// that are not null, of problems that `suits` of choice.h lets through, and return a status.
template <class T>
struct Directions {
    int (*forward)(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
                   bool accumulate, int threads);
    int (*backward_data)(const ece408_problem& problem, const T* w, const T* dy, T* dx,
                         bool accumulate, int threads);
    int (*backward_weight)(const ece408_problem& problem, const T* x, const T* dy, T* dw,
                           bool accumulate, int threads);
};

// One of `direct` and `depthwise` returns this, and has done nothing, for weights that are not all
// finite: these multiply them with a border's zeros, and a kernel for any problem is to compute.
constexpr int kNotFinite = -1;

struct Kernel {
    Directions<float> f32;
    Directions<double> f64;
    Directions<Half> f16;
    Directions<float> strict;  // the same arrays as f32, sums in double
    // Floats of what the forward pass in float32 reads in the place of weights and biases, the same for
    // images of any number and size; and what makes it, which may also return kNotFinite. Null where
    // weights are read as they are.
    int64_t (*packed_floats)(const ece408_problem& problem) = nullptr;
    int (*pack)(const ece408_problem& problem, const float* w, const float* bias, float* packed,
                int threads) = nullptr;
    // That pass, with `packed`, unless null, of this problem's layer, and with what follows done to
    // each output, unless `epilogue` has no factors: ECE408_UNSUPPORTED where it cannot do that. Null
    // where there is neither.
    int (*forward_packed)(const ece408_problem& problem, const float* x, const float* w,
                          const float* bias, const float* packed, const ece408_epilogue& epilogue,
                          float* y, int threads) = nullptr;
};

#define ECE408_DECLARE_KERNEL(name) ECE408_DECLARE_BUILDS(Kernel, name)
ECE408_KERNELS(ECE408_DECLARE_KERNEL)

}  // namespace ece408
