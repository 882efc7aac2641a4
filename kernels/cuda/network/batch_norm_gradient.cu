// Gradients of batch normalisation with an optional sum and relu or clip, and new moving averages.
//
// Two passes like the forward ones: sums of the gradients and of their products with the
// differences from the mean, then dx. The first one also writes the gradients after relu, `dadded`,
// if there is an addend, and the second one reads them. Small channels have one split, whose block
// does both.
#include "channel_passes.cuh"

#ifndef EPSILON
#define EPSILON 1e-3
#define MOMENTUM 0.9
#define ADDS 0  // there is an addend
#define ACCUMULATES 0  // dx is added to what is in its place
#endif
#ifndef PASSES
#define PASSES(v) true  // whether a gradient passes the function of v; after a sum, v is its result
#endif
#define READ \
    const float *x, const float *dy, const float *y, const float *mean, const float *factor, \
        const float *addend

struct Arrays {
    const float *x, *dy, *y;
    Normal normal;

    __device__ Arrays(const Pass &pass, READ) : x(x), dy(dy), y(y), normal{} {
        if (pass.is_empty()) return;
        normal = {__ldg(mean + pass.channel), __ldg(factor + pass.channel),
                  __ldg(addend + pass.channel)};
    }
};

template <int V>
struct Terms {
    Vector<V> x, gradient, before;
};

// x, and the gradients, those that pass if `masked`.
template <int V>
__device__ Terms<V> terms(const Arrays &from, Place at, bool masked) {
    Terms<V> found{load<V>(from.x + at.x), load<V>(from.dy + at.y)};
    Vector<V> result{};
    if (ADDS && masked) result = load<V>(from.y + at.y);
#pragma unroll
    for (int k = 0; k < V; k++) {
        const float v = ADDS ? result.of[k] : from.normal.of(found.x.of[k]);
        if (masked && !(PASSES(v))) found.gradient.of[k] = 0;
    }
    return found;
}

template <int V>
__device__ Sums product_sums(const Pass &pass, float *dadded, const Arrays &from) {
    Sums sums;
    if (pass.is_empty()) return sums;
    const auto fetch = [&](Place at) { return terms<V>(from, at, true); };
    pass.each<V, 2>(fetch, [&](Place at, const Terms<V> &of) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            sums.add(of.gradient.of[k], of.gradient.of[k] * (of.x.of[k] - from.normal.mean));
        }
        if (ADDS) store<V>(dadded + at.y, of.gradient);
    });
    return sums;
}

__device__ Sums product_sums(const Pass &pass, float *dadded, const Arrays &from) {
    return pass.has_vectors(from.x, from.dy, ADDS ? dadded : from.x, ADDS ? from.y : from.x)
               ? product_sums<4>(pass, dadded, from)
               : product_sums<1>(pass, dadded, from);
}

struct Factors {
    float of_gradient, of_difference, constant;
};

// With several splits dy is `dadded`, if that is written, and has passed relu.
template <int V>
__device__ void put_gradients(const Pass &pass, const Factors &f, float *dx, const Arrays &from) {
    const auto fetch = [&](Place at) {
        Terms<V> found = terms<V>(from, at, !(ADDS && pass.splits > 1));
        if (ACCUMULATES) found.before = *reinterpret_cast<const Vector<V> *>(dx + at.x);
        return found;
    };
    pass.each<V, 2>(fetch, [&](Place at, Terms<V> &of) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            of.x.of[k] = of.gradient.of[k] * f.of_gradient +
                         ((of.x.of[k] - from.normal.mean) * f.of_difference + f.constant);
            if (ACCUMULATES) of.x.of[k] += of.before.of[k];
        }
        store<V>(dx + at.x, of.x);
    });
}

extern "C" __global__ void PASS sum(double2 *__restrict__ parts, float *__restrict__ dadded, READ,
                                    SIZES) {
    const Pass pass(GIVEN, blockIdx.x, blockIdx.y);
    const Arrays from(pass, x, dy, y, mean, factor, addend);
    put_sums(parts, pass, product_sums(pass, dadded, from));
}

// Without `gamma` that is 1. `zeros` are the sums of dx.
extern "C" __global__ void PASS
    differentiate(float *__restrict__ dx, float *__restrict__ dgamma, float *__restrict__ dbeta,
                  float *__restrict__ zeros, float *__restrict__ new_mean,
                  float *__restrict__ new_variance, float *__restrict__ dadded, READ,
                  const float *__restrict__ inverse, const float *__restrict__ gamma,
                  const float *__restrict__ moving_mean, const float *__restrict__ moving_variance,
                  const double2 *__restrict__ parts, SIZES) {
    const Pass pass(GIVEN, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y);
    const Arrays from(pass, x, dy, y, mean, factor, addend);
    const Sums total = add_up(splits > 1 ? sums_of(parts, pass) : product_sums(pass, dadded, from));
    __shared__ Factors of_lanes[kLanes];
    const unsigned channel = pass.channel;
    if (threadIdx.x < kLanes && !pass.is_empty()) {
        const float own_inverse = __ldg(inverse + channel);
        const double count = double(images) * pixels, own = own_inverse;
        const double scale = own * (gamma ? __ldg(gamma + channel) : 1.f);
        const double of_difference = -scale * own * own * total.second / count;
        of_lanes[threadIdx.x] = {float(scale), float(of_difference),
                                 float(-scale * total.first / count)};
        if (pass.split == 0) {
            constexpr float kept = MOMENTUM, rest = 1 - MOMENTUM, epsilon = EPSILON;
            const float variance = 1 / (own_inverse * own_inverse) - epsilon;
            dgamma[channel] = float(total.second * own);
            dbeta[channel] = float(total.first);
            zeros[channel] = 0;
            new_mean[channel] = __ldg(moving_mean + channel) * kept + from.normal.mean * rest;
            new_variance[channel] = __ldg(moving_variance + channel) * kept + variance * rest;
        }
    }
    __syncthreads();
    if (pass.is_empty()) return;
    const Factors f = of_lanes[threadIdx.x % kLanes];
    if (pass.has_vectors(dx, x, dy, ADDS ? y : x)) put_gradients<4>(pass, f, dx, from);
    else put_gradients<1>(pass, f, dx, from);
}
