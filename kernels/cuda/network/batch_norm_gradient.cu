// Gradients of batch normalisation with an optional sum and relu.
//
// Two passes like the forward ones: sums of the gradients and of their products with the
// differences from the mean, then dx. The first one also writes the gradients after relu, `dadded`,
// if there is an addend, and the second one reads them. Small channels have one split, whose block
// does both.
#include "channel_passes.cuh"

#ifndef ADDS
#define ADDS 0  // there is an addend
#endif
#ifndef IS_RELU
#define IS_RELU 0
#endif

template <int V>
struct Both {
    Vector<V> x, gradient;
};

// x, and the gradients that relu passes on, if `MASKED`: where its result y is positive.
template <int V, bool MASKED>
__device__ Both<V> both(const float *x, const float *dy, const float *y, unsigned at) {
    Both<V> found{load<V>(x + at), load<V>(dy + at)};
    if (MASKED) {
        const auto result = load<V>(y + at);
#pragma unroll
        for (int k = 0; k < V; k++) {
            found.gradient.of[k] = result.of[k] > 0 ? found.gradient.of[k] : 0;
        }
    }
    return found;
}

template <int V>
__device__ Sums product_sums(const Pass &pass, float *dadded, const float *x, const float *dy,
                             const float *y, const float *means) {
    Sums sums;
    if (pass.is_empty()) return sums;
    const float mean = __ldg(means + pass.channel);
    const auto fetch = [&](unsigned at) { return both<V, IS_RELU>(x, dy, y, at); };
    pass.each<V, 2>(fetch, [&](unsigned at, const Both<V> &of) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            sums.add(of.gradient.of[k], of.gradient.of[k] * (of.x.of[k] - mean));
        }
        if (ADDS) store<V>(dadded + at, of.gradient);
    });
    return sums;
}

__device__ Sums product_sums(const Pass &pass, float *dadded, const float *x, const float *dy,
                             const float *y, const float *means) {
    return has_vectors(pass.pixels, x, dy, ADDS ? dadded : x, IS_RELU ? y : x)
               ? product_sums<4>(pass, dadded, x, dy, y, means)
               : product_sums<1>(pass, dadded, x, dy, y, means);
}

struct Factors {
    float mean, of_gradient, of_difference, constant;
};

template <int V, bool MASKED>
__device__ void put_gradients(const Pass &pass, const Factors &f, float *dx, const float *x,
                              const float *dy, const float *y) {
    const auto fetch = [&](unsigned at) { return both<V, MASKED>(x, dy, y, at); };
    pass.each<V, 2>(fetch, [&](unsigned at, Both<V> &of) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            of.x.of[k] = of.gradient.of[k] * f.of_gradient +
                         ((of.x.of[k] - f.mean) * f.of_difference + f.constant);
        }
        store<V>(dx + at, of.x);
    });
}

template <bool MASKED>
__device__ void put_gradients(const Pass &pass, const Factors &f, float *dx, const float *x,
                              const float *dy, const float *y) {
    if (has_vectors(pass.pixels, dx, x, dy, MASKED ? y : x))
        put_gradients<4, MASKED>(pass, f, dx, x, dy, y);
    else
        put_gradients<1, MASKED>(pass, f, dx, x, dy, y);
}

extern "C" __global__ void PASS
    sum(double2 *parts, float *dadded, const float *x, const float *dy, const float *y,
        const float *mean, int images, int channels, int pixels, int splits) {
    const Pass pass(images, channels, pixels, splits, blockIdx.x, blockIdx.y);
    put_sums(parts, pass, product_sums(pass, dadded, x, dy, y, mean));
}

// With several splits dy is `dadded`, if that is written, and has passed relu. Without `gamma` that
// is 1.
extern "C" __global__ void PASS
    differentiate(float *dx, float *dgamma, float *dbeta, float *dadded, const float *x,
                  const float *dy, const float *y, const float *mean, const float *inverse,
                  const float *gamma, const double2 *parts, int images, int channels, int pixels,
                  int splits) {
    const Pass pass(images, channels, pixels, splits, gridDim.x - 1 - blockIdx.x,
                    gridDim.y - 1 - blockIdx.y);
    const Sums total = add_up(splits > 1 ? sums_of(parts, pass)
                                         : product_sums(pass, dadded, x, dy, y, mean));
    __shared__ Factors of_lanes[kLanes];
    const unsigned channel = pass.channel;
    if (threadIdx.x < kLanes && !pass.is_empty()) {
        const double count = double(images) * pixels, own = __ldg(inverse + channel);
        const double scale = own * (gamma ? __ldg(gamma + channel) : 1.f);
        const double of_difference = -scale * own * own * total.second / count;
        of_lanes[threadIdx.x] = {__ldg(mean + channel), float(scale), float(of_difference),
                                 float(-scale * total.first / count)};
        if (pass.split == 0) {
            dgamma[channel] = float(total.second * own);
            dbeta[channel] = float(total.first);
        }
    }
    __syncthreads();
    if (pass.is_empty()) return;
    const Factors f = of_lanes[threadIdx.x % kLanes];
    if (ADDS && splits > 1) put_gradients<false>(pass, f, dx, x, dy, y);
    else put_gradients<IS_RELU>(pass, f, dx, x, dy, y);
}
