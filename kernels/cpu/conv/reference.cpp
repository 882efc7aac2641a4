// The textbook loops, one output element at a time, sums in double: the oracle of all other
// kernels. One thread computes each element's sum in a fixed order, so no result depends on the
// number of threads. Compiled without contraction of a * b + c.
#include "conv/textbook.h"
#include "host/thread_pool.h"

namespace ece408 {
namespace {

// The nearest float, or of the two neighbours of an inexact value the one with an odd last bit:
// rounding that to half gives the same as rounding the double directly.
float odd_float(double value) {
    const float nearest = static_cast<float>(value);
    if (nearest == value || nearest != nearest) return nearest;
    uint32_t bits = bits_of_float(nearest);
    if ((nearest < 0 ? -nearest : nearest) > (value < 0 ? -value : value)) --bits;
    return float_of_bits(bits | 1u);
}

void round_to(double value, float* out) { *out = static_cast<float>(value); }
void round_to(double value, double* out) { *out = value; }
void round_to(double value, Half* out) { *out = portable_to_half(odd_float(value)); }

template <class T>
void put(T* out, double sum, bool accumulate) {
    round_to(accumulate ? wide(*out) + sum : sum, out);
}

template <class T>
void forward(const Shape& s, const T* x, const T* w, const T* bias, T* y, bool accumulate,
             int threads) {
    parallel_for(threads, s.batch * s.filters, [&](int64_t plane, int) {
        const int64_t b = plane / s.filters, m = plane % s.filters;
        for (int64_t i = 0; i < s.out_height; ++i)
            for (int64_t j = 0; j < s.out_width; ++j) {
                const double sum = output_element(s, x, w, b, m, i, j);
                put(&y[y_index(s, b, m, i, j)], bias ? wide(bias[m]) + sum : sum, accumulate);
            }
    });
}

template <class T>
void backward_data(const Shape& s, const T* w, const T* dy, T* dx, bool accumulate, int threads) {
    parallel_for(threads, s.batch * s.channels, [&](int64_t plane, int) {
        const int64_t b = plane / s.channels, c = plane % s.channels;
        for (int64_t h = 0; h < s.height; ++h)
            for (int64_t v = 0; v < s.width; ++v)
                put(&dx[x_index(s, b, c, h, v)], input_gradient(s, w, dy, b, c, h, v),
                    accumulate);
    });
}

template <class T>
void backward_weight(const Shape& s, const T* x, const T* dy, T* dw, bool accumulate,
                     int threads) {
    parallel_for(threads, s.filters * s.group_channels, [&](int64_t window, int) {
        const int64_t m = window / s.group_channels, c = window % s.group_channels;
        for (int64_t p = 0; p < s.kernel_h; ++p)
            for (int64_t q = 0; q < s.kernel_w; ++q)
                put(&dw[w_index(s, m, c, p, q)], weight_gradient(s, x, dy, m, c, p, q),
                    accumulate);
    });
}

template <class T>
void backward_bias(const Shape& s, const T* dy, T* dbias, bool accumulate, int threads) {
    parallel_for(threads, s.filters, [&](int64_t m, int) {
        double sum = 0;
        for (int64_t b = 0; b < s.batch; ++b)
            for (int64_t i = 0; i < s.out_height; ++i)
                for (int64_t j = 0; j < s.out_width; ++j) sum += wide(dy[y_index(s, b, m, i, j)]);
        put(&dbias[m], sum, accumulate);
    });
}

bool usable(const ece408_problem* problem, int threads) {
    return problem && valid(*problem) && threads >= 1;
}

// An array of the elements that the functions above take.
template <class T>
T* stored(T* array) {
    return array;
}

const Half* stored(const uint16_t* array) { return reinterpret_cast<const Half*>(array); }
Half* stored(uint16_t* array) { return reinterpret_cast<Half*>(array); }

}  // namespace
}  // namespace ece408

#define ECE408_RUN_REFERENCE(function, given, ...)                                               \
    using ece408::stored;                                                                        \
    if (!ece408::usable(problem, threads) || !(given)) return ECE408_INVALID;                    \
    ece408::function(ece408::derive(*problem), __VA_ARGS__, accumulate != 0, threads);           \
    return ECE408_OK;

#define ECE408_DEFINE_REFERENCE(T, suffix)                                                       \
    int ece408_reference_forward_##suffix(const ece408_problem* problem, const T* x, const T* w, \
                                          const T* bias, T* y, int accumulate, int threads) {    \
        ECE408_RUN_REFERENCE(forward, x && w && y, stored(x), stored(w), stored(bias), stored(y))\
    }                                                                                            \
    int ece408_reference_backward_data_##suffix(const ece408_problem* problem, const T* w,       \
                                                const T* dy, T* dx, int accumulate,              \
                                                int threads) {                                   \
        ECE408_RUN_REFERENCE(backward_data, w && dy && dx, stored(w), stored(dy), stored(dx))    \
    }                                                                                            \
    int ece408_reference_backward_weight_##suffix(const ece408_problem* problem, const T* x,     \
                                                  const T* dy, T* dw, int accumulate,            \
                                                  int threads) {                                 \
        ECE408_RUN_REFERENCE(backward_weight, x && dy && dw, stored(x), stored(dy), stored(dw))  \
    }                                                                                            \
    int ece408_reference_backward_bias_##suffix(const ece408_problem* problem, const T* dy,      \
                                                T* dbias, int accumulate, int threads) {         \
        ECE408_RUN_REFERENCE(backward_bias, dy && dbias, stored(dy), stored(dbias))              \
    }

ECE408_DEFINE_REFERENCE(float, f32)
ECE408_DEFINE_REFERENCE(double, f64)
ECE408_DEFINE_REFERENCE(uint16_t, f16)
