// The list of fast kernels, and the functions of each.
#pragma once

#include "api/builds.h"
#include "api/ece408.h"

// All kernels, in the order of their numbers in ece408.h's functions.
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

// A kernel's functions for one type, null for missing directions. They take arrays that are not
// null, of problems that `suits` of choice.h accepts, and return a status.
template <class T>
struct Directions {
    int (*forward)(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
                   bool accumulate, int threads);
    int (*backward_data)(const ece408_problem& problem, const T* w, const T* dy, T* dx,
                         bool accumulate, int threads);
    int (*backward_weight)(const ece408_problem& problem, const T* x, const T* dy, T* dw,
                           bool accumulate, int threads);
};

// Returned by `direct` and `depthwise`, which then have done nothing, for weights that are not all
// finite: they multiply weights with a border's zeros. A kernel for any problem computes instead.
constexpr int kNotFinite = -1;

struct Kernel {
    Directions<float> f32;
    Directions<double> f64;
    Directions<float> strict;  // the same arrays as f32, sums in double
    // Floats of packed weights and biases for the forward pass in float32, the same for images of
    // any number and size, but others if outputs have one row or column, as their stride does not
    // count; and the function that packs them, which may also return kNotFinite. Null if weights
    // are read in place.
    int64_t (*packed_floats)(const ece408_problem& problem) = nullptr;
    int (*pack)(const ece408_problem& problem, const float* w, const float* bias, float* packed,
                int threads) = nullptr;
    // The forward pass with packed weights of this layer (or null) and with an epilogue (unless its
    // factors are null). Returns ECE408_UNSUPPORTED if it cannot do that. Null without either.
    int (*forward_packed)(const ece408_problem& problem, const float* x, const float* w,
                          const float* bias, const float* packed, const ece408_epilogue& epilogue,
                          float* y, int threads) = nullptr;
};

#define ECE408_DECLARE_KERNEL(name) ECE408_DECLARE_BUILDS(Kernel, name)
ECE408_KERNELS(ECE408_DECLARE_KERNEL)

}  // namespace ece408
