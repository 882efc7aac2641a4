// Batch normalisation with the batch's statistics, an optional sum and relu, and the gradients.
// Compiled once per instruction set, like direct.cpp.
//
// A channel's images are read two or three times, channel by channel, so that all but the first
// reads come from the caches. Terms are summed in float for a while, then in double.
#include "layers/batch_norm.h"

#include "host/thread_pool.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// One channel of an array: `pixels` floats of each image, images `stride` apart.
struct Channel {
    int64_t images, pixels, stride;
    double count;

    explicit Channel(const ece408_batch& batch)
        : images(batch.images),
          pixels(batch.pixels),
          stride(batch.channels * batch.pixels),
          count(static_cast<double>(batch.images) * static_cast<double>(batch.pixels)) {}
};

// Two sums over a channel.
struct Sums {
    double first = 0, second = 0;
};

// Vectors per partial sum in float.
constexpr int64_t kRun = 64;

double lanes_added(Vec v) {
    float lanes[kLanes];
    store(lanes, v);
    double sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
}

inline float load_like(const float* p, float) { return *p; }
inline Vec load_like(const float* p, Vec) { return load(p); }
inline void store_like(float* p, float value) { *p = value; }
inline void store_like(float* p, Vec value) { store(p, value); }
inline float all(float value, float) { return value; }
inline Vec all(float value, Vec) { return broadcast(value); }

// Sums over a channel: `terms(place, like, &first, &second)` adds to two sums, for each vector and
// for the floats that remain of an image.
template <class Terms>
Sums sums(const Channel& channel, const Terms& terms) {
    const Vec zero = broadcast(0.f);
    Sums total;
    for (int64_t image = 0; image < channel.images; image++) {
        const int64_t begin = image * channel.stride, end = begin + channel.pixels;
        int64_t at = begin;
        while (at + kLanes <= end) {
            // Two accumulators each hide the latency of an addition.
            Vec first[2] = {zero, zero}, second[2] = {zero, zero};
            const int64_t vectors = (end - at) / kLanes;
            const int64_t stop = at + (vectors < 2 * kRun ? vectors : 2 * kRun) * kLanes;
            for (; at + 2 * kLanes <= stop; at += 2 * kLanes) {
                terms(at, zero, &first[0], &second[0]);
                terms(at + kLanes, zero, &first[1], &second[1]);
            }
            if (at < stop) terms(at, zero, &first[0], &second[0]), at += kLanes;
            total.first += lanes_added(first[0] + first[1]);
            total.second += lanes_added(second[0] + second[1]);
        }
        float first = 0, second = 0;
        for (; at < end; at++) terms(at, 0.f, &first, &second);
        total.first += first, total.second += second;
    }
    return total;
}

// Calls `work(place, like)` for every vector of a channel, and for the floats that remain.
template <class Work>
void each(const Channel& channel, const Work& work) {
    const Vec zero = broadcast(0.f);
    for (int64_t image = 0; image < channel.images; image++) {
        const int64_t begin = image * channel.stride, end = begin + channel.pixels;
        int64_t at = begin;
        for (; at + kLanes <= end; at += kLanes) work(at, zero);
        for (; at < end; at++) work(at, 0.f);
    }
}

// The sums of the differences from a number, and of their squares.
Sums difference_sums(const Channel& channel, const float* x, float from) {
    return sums(channel, [=](int64_t at, auto like, auto* sum, auto* squares) {
        const auto difference = load_like(x + at, like) - all(from, like);
        *sum += difference, *squares += difference * difference;
    });
}

template <bool ADDS, bool IS_RELU>
void normalize(const Channel& channel, const float* x, const float* added, float mean, float factor,
               float addend, float* y) {
    each(channel, [=](int64_t at, auto like) {
        auto value = (load_like(x + at, like) - all(mean, like)) * all(factor, like);
        value += all(addend, like);
        if (ADDS) value += load_like(added + at, like);
        // NaN stays NaN.
        store_like(y + at, IS_RELU ? (value < all(0.f, like) ? all(0.f, like) : value) : value);
    });
}

void forward_channel(const ece408_batch& batch, const float* x, const float* added, float gamma,
                     float beta, float* y, float* mean, float* inverse) {
    const Channel channel(batch);
    const float about = static_cast<float>(difference_sums(channel, x, 0).first / channel.count);
    // Differences from a number near the mean, because squares of large numbers would cancel.
    const Sums rest = difference_sums(channel, x, about);
    const double from_about = rest.first / channel.count;
    double variance = rest.second / channel.count - from_about * from_about;
    if (variance < 0) variance = 0;
    const double deviation = __builtin_sqrt(variance + batch.epsilon);
    *mean = static_cast<float>(about + from_about);
    *inverse = deviation == 0 ? 0.f : static_cast<float>(1 / deviation);
    const float factor = *inverse * gamma;
    if (added && batch.is_relu)
        normalize<true, true>(channel, x, added, *mean, factor, beta, y);
    else if (added)
        normalize<true, false>(channel, x, added, *mean, factor, beta, y);
    else if (batch.is_relu)
        normalize<false, true>(channel, x, added, *mean, factor, beta, y);
    else
        normalize<false, false>(channel, x, added, *mean, factor, beta, y);
}

// The gradient for the input of relu, from that for y; without relu they are the same.
template <bool IS_RELU, class T>
T through_relu(const float* dy, const float* y, int64_t at, T like) {
    const T gradient = load_like(dy + at, like);
    return IS_RELU ? (load_like(y + at, like) > all(0.f, like) ? gradient : all(0.f, like))
                   : gradient;
}

// The sums of the gradients, and of their products with the differences from the mean. Also stores
// the gradients to `dadded`, unless null.
template <bool IS_RELU, bool STORES>
Sums gradient_sums(const Channel& channel, const float* x, const float* y, const float* dy,
                   float mean, float* dadded) {
    return sums(channel, [=](int64_t at, auto like, auto* sum, auto* products) {
        const auto gradient = through_relu<IS_RELU>(dy, y, at, like);
        *sum += gradient;
        *products += gradient * (load_like(x + at, like) - all(mean, like));
        if (STORES) store_like(dadded + at, gradient);
    });
}

struct Factors {
    float of_gradient, of_difference, constant;
};

template <bool IS_RELU>
void gradients(const Channel& channel, const float* x, const float* y, const float* dy, float mean,
               const Factors& f, float* dx) {
    each(channel, [=](int64_t at, auto like) {
        const auto gradient = through_relu<IS_RELU>(dy, y, at, like);
        const auto difference = load_like(x + at, like) - all(mean, like);
        store_like(dx + at, gradient * all(f.of_gradient, like) +
                                (difference * all(f.of_difference, like) + all(f.constant, like)));
    });
}

void backward_channel(const ece408_batch& batch, const float* x, const float* y, const float* dy,
                      float gamma, float mean, float inverse, float* dx, float* dadded,
                      float* dgamma, float* dbeta) {
    const Channel channel(batch);
    const Sums total = dadded && batch.is_relu
                           ? gradient_sums<true, true>(channel, x, y, dy, mean, dadded)
                       : dadded        ? gradient_sums<false, true>(channel, x, y, dy, mean, dadded)
                       : batch.is_relu ? gradient_sums<true, false>(channel, x, y, dy, mean, dadded)
                                       : gradient_sums<false, false>(channel, x, y, dy, mean, dadded);
    const double scale = static_cast<double>(gamma) * inverse;
    const double of_difference = -scale * inverse * inverse * total.second / channel.count;
    const Factors factors{static_cast<float>(scale), static_cast<float>(of_difference),
                          static_cast<float>(-scale * total.first / channel.count)};
    // With `dadded`, the gradients have already passed relu.
    if (batch.is_relu && !dadded)
        gradients<true>(channel, x, y, dy, mean, factors, dx);
    else
        gradients<false>(channel, x, y, dadded ? dadded : dy, mean, factors, dx);
    *dgamma = static_cast<float>(total.second * inverse);
    *dbeta = static_cast<float>(total.first);
}

const float* from(const float* array, int64_t place) { return array ? array + place : nullptr; }
float* from(float* array, int64_t place) { return array ? array + place : nullptr; }

void forward(const ece408_batch& batch, const float* x, const float* added, const float* gamma,
             const float* beta, float* y, float* mean, float* inverse, int threads) {
    parallel_for(threads, batch.channels, [&](int64_t c, int) {
        const int64_t place = c * batch.pixels;
        forward_channel(batch, x + place, from(added, place), gamma ? gamma[c] : 1.f, beta[c],
                        y + place, mean + c, inverse + c);
    });
}

void backward(const ece408_batch& batch, const float* x, const float* y, const float* dy,
              const float* gamma, const float* mean, const float* inverse, float* dx, float* dadded,
              float* dgamma, float* dbeta, int threads) {
    parallel_for(threads, batch.channels, [&](int64_t c, int) {
        const int64_t place = c * batch.pixels;
        backward_channel(batch, x + place, y + place, dy + place, gamma ? gamma[c] : 1.f, mean[c],
                         inverse[c], dx + place, from(dadded, place), dgamma + c, dbeta + c);
    });
}

}  // namespace

extern const BatchNorm ECE408_THIS_BUILD(batch_norm) = {forward, backward};

}  // namespace ece408
