// The epilogue of a convolution: a factor and an addend for each filter, such as MXNet's BatchNorm
// with moving averages, a sum with another array, and bounds, such as relu's and clip's. Then
// MXNet's Flatten, which changes the shape.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace ece408 {

struct Epilogue {
    bool normalizes = false, scaled = false;  // scaled: by gamma, else by 1
    bool is_kept = false;  // gamma and the others are variables of a graph that keeps weights
    bool adds = false;
    bool is_flat = false;  // whether the output is (images, everything else)
    double epsilon = 0;
    float lowest = -std::numeric_limits<float>::infinity();
    float highest = std::numeric_limits<float>::infinity();

    bool is_nothing() const {
        const bool unbounded = std::isinf(lowest) && std::isinf(highest) && lowest < highest;
        return !normalizes && !adds && unbounded;
    }
};

struct Affine {
    std::vector<float> factors, addends;
};

}  // namespace ece408

namespace {

using ece408::Affine;
using ece408::Epilogue;

// The compiler also makes these functions for vectors of 8 numbers, and the loader chooses. AVX2
// without FMA does not fuse products and sums: results are the same.
#if defined(__x86_64__)
#define ECE408_WIDER __attribute__((target_clones("avx2", "default")))
#else
#define ECE408_WIDER
#endif

// From gamma, beta, mean and variance, one number for each filter.
ECE408_WIDER inline Affine affine(const Epilogue& epilogue, int64_t filters,
                                  const float* const parameters[4]) {
    Affine result{std::vector<float>(filters, 1.f), std::vector<float>(filters, 0.f)};
    if (!epilogue.normalizes) return result;
    for (int64_t m = 0; m < filters; m++) {
        const double scale = epilogue.scaled ? parameters[0][m] : 1.0;
        const double factor = scale / std::sqrt(parameters[3][m] + epilogue.epsilon);
        result.factors[m] = static_cast<float>(factor);
        result.addends[m] = static_cast<float>(parameters[1][m] - parameters[2][m] * factor);
    }
    return result;
}

inline float bounded(float value, float lowest, float highest) {
    value = value < lowest ? lowest : value;
    return value > highest ? highest : value;
}

// One plane of `pixels` pixels: y from x, which may be the same array, and the summand, unless
// null. NaN stays NaN.
ECE408_WIDER inline void apply_to_plane(const Epilogue& epilogue, const Affine& affine, int64_t filter,
                         int64_t pixels, const float* x, const float* added, float* y) {
    const float factor = affine.factors[filter], addend = affine.addends[filter];
    const float lowest = epilogue.lowest, highest = epilogue.highest;
    if (added) {
        for (int64_t i = 0; i < pixels; i++)
            y[i] = bounded(x[i] * factor + addend + added[i], lowest, highest);
    } else {
        for (int64_t i = 0; i < pixels; i++)
            y[i] = bounded(x[i] * factor + addend, lowest, highest);
    }
}

}  // namespace
