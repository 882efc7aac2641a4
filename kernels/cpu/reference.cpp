// The textbook loops, one output element at a time, sums in double: the oracle of every other
// kernel. Each element's sum is taken by one thread in one fixed order, so that no result
// depends on the number of threads. Compiled without contraction of a * b + c.
#include "half.h"
#include "shape.h"
#include "team.h"

namespace ece408 {
namespace {

double get(float value) { return value; }
double get(double value) { return value; }
double get(Half value) { return portable_to_float(value); }

// The nearest float, but of the two next to an inexact value the one with an odd last bit:
// rounded to half, that gives what rounding the double at once would.
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
    round_to(accumulate ? get(*out) + sum : sum, out);
}

// Row (or column) of x that tap `tap` of output row `out` reads; may lie outside x.
int64_t input_at(int64_t out, int64_t tap, int64_t stride, int64_t pad, int64_t dilate) {
    return out * stride + tap * dilate - pad;
}

bool inside(int64_t i, int64_t size) { return i >= 0 && i < size; }

// Output row (or column) whose tap `tap` reads input row `in`, or -1 if there is none.
int64_t output_at(int64_t in, int64_t tap, int64_t stride, int64_t pad, int64_t dilate,
                  int64_t out_size) {
    const int64_t scaled = in + pad - tap * dilate;
    if (scaled < 0 || scaled % stride != 0 || scaled / stride >= out_size) return -1;
    return scaled / stride;
}

int64_t x_index(const Shape& s, int64_t b, int64_t c, int64_t h, int64_t w) {
    return ((b * s.channels + c) * s.height + h) * s.width + w;
}

// `c` counts the channels of the filter's group.
int64_t w_index(const Shape& s, int64_t m, int64_t c, int64_t p, int64_t q) {
    return ((m * s.group_channels + c) * s.kernel_h + p) * s.kernel_w + q;
}

int64_t y_index(const Shape& s, int64_t b, int64_t m, int64_t i, int64_t j) {
    return ((b * s.filters + m) * s.out_height + i) * s.out_width + j;
}

template <class T>
double output_element(const Shape& s, const T* x, const T* w, int64_t b, int64_t m, int64_t i,
                      int64_t j) {
    const int64_t first_channel = m / s.group_filters * s.group_channels;
    double sum = 0;
    for (int64_t c = 0; c < s.group_channels; ++c)
        for (int64_t p = 0; p < s.kernel_h; ++p) {
            const int64_t row = input_at(i, p, s.stride_h, s.pad_h, s.dilate_h);
            if (!inside(row, s.height)) continue;
            for (int64_t q = 0; q < s.kernel_w; ++q) {
                const int64_t col = input_at(j, q, s.stride_w, s.pad_w, s.dilate_w);
                if (!inside(col, s.width)) continue;
                sum += get(x[x_index(s, b, first_channel + c, row, col)]) *
                       get(w[w_index(s, m, c, p, q)]);
            }
        }
    return sum;
}

template <class T>
void forward(const Shape& s, const T* x, const T* w, const T* bias, T* y, bool accumulate,
             int threads) {
    share(threads, s.batch * s.filters, [&](int64_t plane, int) {
        const int64_t b = plane / s.filters, m = plane % s.filters;
        for (int64_t i = 0; i < s.out_height; ++i)
            for (int64_t j = 0; j < s.out_width; ++j) {
                const double sum = output_element(s, x, w, b, m, i, j);
                put(&y[y_index(s, b, m, i, j)], bias ? get(bias[m]) + sum : sum, accumulate);
            }
    });
}

// Gradient of x[b, c, h, v]: every output that read it, times the weight it read it with.
template <class T>
double input_gradient(const Shape& s, const T* w, const T* dy, int64_t b, int64_t c, int64_t h,
                      int64_t v) {
    const int64_t group = c / s.group_channels;
    double sum = 0;
    for (int64_t m = group * s.group_filters; m < (group + 1) * s.group_filters; ++m)
        for (int64_t p = 0; p < s.kernel_h; ++p) {
            const int64_t i = output_at(h, p, s.stride_h, s.pad_h, s.dilate_h, s.out_height);
            if (i < 0) continue;
            for (int64_t q = 0; q < s.kernel_w; ++q) {
                const int64_t j = output_at(v, q, s.stride_w, s.pad_w, s.dilate_w, s.out_width);
                if (j < 0) continue;
                sum += get(dy[y_index(s, b, m, i, j)]) *
                       get(w[w_index(s, m, c % s.group_channels, p, q)]);
            }
        }
    return sum;
}

template <class T>
void backward_data(const Shape& s, const T* w, const T* dy, T* dx, bool accumulate, int threads) {
    share(threads, s.batch * s.channels, [&](int64_t plane, int) {
        const int64_t b = plane / s.channels, c = plane % s.channels;
        for (int64_t h = 0; h < s.height; ++h)
            for (int64_t v = 0; v < s.width; ++v)
                put(&dx[x_index(s, b, c, h, v)], input_gradient(s, w, dy, b, c, h, v),
                    accumulate);
    });
}

// Gradient of w[m, c, p, q]: every output of filter m, times the input it multiplied there.
template <class T>
double weight_gradient(const Shape& s, const T* x, const T* dy, int64_t m, int64_t c, int64_t p,
                       int64_t q) {
    const int64_t channel = m / s.group_filters * s.group_channels + c;
    double sum = 0;
    for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t i = 0; i < s.out_height; ++i) {
            const int64_t row = input_at(i, p, s.stride_h, s.pad_h, s.dilate_h);
            if (!inside(row, s.height)) continue;
            for (int64_t j = 0; j < s.out_width; ++j) {
                const int64_t col = input_at(j, q, s.stride_w, s.pad_w, s.dilate_w);
                if (!inside(col, s.width)) continue;
                sum += get(dy[y_index(s, b, m, i, j)]) *
                       get(x[x_index(s, b, channel, row, col)]);
            }
        }
    return sum;
}

template <class T>
void backward_weight(const Shape& s, const T* x, const T* dy, T* dw, bool accumulate,
                     int threads) {
    share(threads, s.filters * s.group_channels, [&](int64_t window, int) {
        const int64_t m = window / s.group_channels, c = window % s.group_channels;
        for (int64_t p = 0; p < s.kernel_h; ++p)
            for (int64_t q = 0; q < s.kernel_w; ++q)
                put(&dw[w_index(s, m, c, p, q)], weight_gradient(s, x, dy, m, c, p, q),
                    accumulate);
    });
}

template <class T>
void backward_bias(const Shape& s, const T* dy, T* dbias, bool accumulate, int threads) {
    share(threads, s.filters, [&](int64_t m, int) {
        double sum = 0;
        for (int64_t b = 0; b < s.batch; ++b)
            for (int64_t i = 0; i < s.out_height; ++i)
                for (int64_t j = 0; j < s.out_width; ++j) sum += get(dy[y_index(s, b, m, i, j)]);
        put(&dbias[m], sum, accumulate);
    });
}

bool usable(const ece408_problem* problem, int threads) {
    return problem && valid(*problem) && threads >= 1;
}

}  // namespace
}  // namespace ece408

#define ECE408_DEFINE_REFERENCE(T, Stored, suffix)                                               \
    int ece408_reference_forward_##suffix(const ece408_problem* problem, const T* x, const T* w, \
                                          const T* bias, T* y, int accumulate, int threads) {    \
        using S = ece408::Stored;                                                                \
        if (!ece408::usable(problem, threads) || !x || !w || !y) return ECE408_INVALID;          \
        ece408::forward(ece408::derive(*problem), reinterpret_cast<const S*>(x),                 \
                        reinterpret_cast<const S*>(w), reinterpret_cast<const S*>(bias),         \
                        reinterpret_cast<S*>(y), accumulate != 0, threads);                      \
        return ECE408_OK;                                                                        \
    }                                                                                            \
    int ece408_reference_backward_data_##suffix(const ece408_problem* problem, const T* w,       \
                                                const T* dy, T* dx, int accumulate,              \
                                                int threads) {                                   \
        using S = ece408::Stored;                                                                \
        if (!ece408::usable(problem, threads) || !w || !dy || !dx) return ECE408_INVALID;        \
        ece408::backward_data(ece408::derive(*problem), reinterpret_cast<const S*>(w),           \
                              reinterpret_cast<const S*>(dy), reinterpret_cast<S*>(dx),          \
                              accumulate != 0, threads);                                         \
        return ECE408_OK;                                                                        \
    }                                                                                            \
    int ece408_reference_backward_weight_##suffix(const ece408_problem* problem, const T* x,     \
                                                  const T* dy, T* dw, int accumulate,            \
                                                  int threads) {                                 \
        using S = ece408::Stored;                                                                \
        if (!ece408::usable(problem, threads) || !x || !dy || !dw) return ECE408_INVALID;        \
        ece408::backward_weight(ece408::derive(*problem), reinterpret_cast<const S*>(x),         \
                                reinterpret_cast<const S*>(dy), reinterpret_cast<S*>(dw),        \
                                accumulate != 0, threads);                                       \
        return ECE408_OK;                                                                        \
    }                                                                                            \
    int ece408_reference_backward_bias_##suffix(const ece408_problem* problem, const T* dy,      \
                                                T* dbias, int accumulate, int threads) {         \
        using S = ece408::Stored;                                                                \
        if (!ece408::usable(problem, threads) || !dy || !dbias) return ECE408_INVALID;           \
        ece408::backward_bias(ece408::derive(*problem), reinterpret_cast<const S*>(dy),          \
                              reinterpret_cast<S*>(dbias), accumulate != 0, threads);            \
        return ECE408_OK;                                                                        \
    }

namespace ece408 {
using Float = float;
using Double = double;
}  // namespace ece408

ECE408_DEFINE_REFERENCE(float, Float, f32)
ECE408_DEFINE_REFERENCE(double, Double, f64)
ECE408_DEFINE_REFERENCE(uint16_t, Half, f16)
