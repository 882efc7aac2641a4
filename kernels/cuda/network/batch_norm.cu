// Batch normalisation by the batch's own mean and variance, an optional sum, and relu or clip.
//
// Two passes: sums of a channel's splits, then y, for which each block adds up its channel's sums
// again. Small channels have one split, whose block does both. The second pass goes backwards, as
// the cache holds the end of x.
#include "channel_passes.cuh"

#ifndef EPSILON
#define EPSILON 1e-3
#define ADDS 0  // the sum with `added`, before relu
#endif
#ifndef ACTIVATED
#define ACTIVATED(v) v  // NaN stays NaN
#endif

// Sums of the differences from the channel's first element, and of their squares: those of large
// equal numbers would not cancel. In double even an element far from the mean will do.
template <int V>
__device__ Sums difference_sums(const Pass &pass, const float *x) {
    Sums sums;
    if (pass.is_empty()) return sums;
    const double about = __ldg(x + pass.channel * pass.pixels);
    const auto fetch = [&](Place at) { return load<V>(x + at.x); };
    pass.each<V, 4>(fetch, [&](Place, const Vector<V> &v) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            const double difference = v.of[k] - about;
            sums.add(difference, difference * difference);
        }
    });
    return sums;
}

__device__ Sums difference_sums(const Pass &pass, const float *x) {
    return pass.has_vectors(x) ? difference_sums<4>(pass, x) : difference_sums<1>(pass, x);
}

template <int V>
__device__ void put_normal(const Pass &pass, const Normal &of, float *y, const float *x,
                           const float *added) {
    struct Pair {
        Vector<V> x, added;
    };
    const auto fetch = [&](Place at) {
        return Pair{load<V>(x + at.x), ADDS ? load<V>(added + at.y) : Vector<V>{}};
    };
    pass.each<V, 4>(fetch, [&](Place at, Pair &pair) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            float value = of.of(pair.x.of[k]);
            if (ADDS) value += pair.added.of[k];
            pair.x.of[k] = ACTIVATED(value);
        }
        store<V>(y + at.y, pair.x);
    });
}

extern "C" __global__ void PASS
    sum(double2 *__restrict__ parts, const float *__restrict__ x, SIZES) {
    const Pass pass(GIVEN, blockIdx.x, blockIdx.y);
    put_sums(parts, pass, difference_sums(pass, x));
}

// With one split it reads no `parts`; without `gamma` that is 1.
extern "C" __global__ void PASS
    normalise(float *__restrict__ y, float *__restrict__ mean, float *__restrict__ inverse,
              float *__restrict__ factor, float *__restrict__ addend, const float *__restrict__ x,
              const float *__restrict__ gamma, const float *__restrict__ beta,
              const float *__restrict__ added, const double2 *__restrict__ parts, SIZES) {
    const Pass pass(GIVEN, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y);
    const Sums total = add_up(splits > 1 ? sums_of(parts, pass) : difference_sums(pass, x));
    __shared__ Normal of_lanes[kLanes];
    const unsigned channel = pass.channel;
    if (threadIdx.x < kLanes && !pass.is_empty()) {
        const double count = double(images) * pixels, from_about = total.first / count;
        const double variance = fmax(total.second / count - from_about * from_about, 0.);
        // NaN if an element is NaN or infinite, else 0.
        const double lost = from_about - from_about;
        const double deviation = sqrt(variance + EPSILON) + lost;
        const float own_mean = float(__ldg(x + channel * pixels) + from_about + lost);
        const float own_inverse = deviation == 0 ? 0.f : float(1 / deviation);
        const float scale = gamma ? __ldg(gamma + channel) : 1.f;
        const Normal own{own_mean, own_inverse * scale, __ldg(beta + channel)};
        of_lanes[threadIdx.x] = own;
        if (pass.split == 0) {
            mean[channel] = own_mean, inverse[channel] = own_inverse;
            factor[channel] = own.factor, addend[channel] = own.addend;
        }
    }
    __syncthreads();
    if (pass.is_empty()) return;
    const Normal of = of_lanes[threadIdx.x % kLanes];
    if (pass.has_vectors(x, y, ADDS ? added : x)) put_normal<4>(pass, of, y, x, added);
    else put_normal<1>(pass, of, y, x, added);
}
