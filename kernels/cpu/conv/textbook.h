// The textbook loops for one output element, with its sum in double. The reference computes all
// elements with them, the fast kernels those that came out infinite or NaN.
//
// The fast kernels also multiply zeros of borders and differences of pixels. With infinite or NaN
// inputs, or sums that overflow, their result may be NaN where the textbook's is not. Finite
// results are right; others are computed again one by one (`Textbook`), by a loop that ends when
// its sum is NaN.
#pragma once

#include "api/shape.h"
#include "micro/half.h"

namespace ece408 {
namespace {

template <class T>
double wide(T value) {
    return static_cast<double>(value);
}

inline double wide(Half value) { return static_cast<double>(portable_to_float(value)); }

// Row (or column) of x that tap `tap` of output row `out` reads; may be outside x.
inline int64_t input_at(int64_t out, int64_t tap, int64_t stride, int64_t pad, int64_t dilate) {
    return out * stride + tap * dilate - pad;
}

inline bool inside(int64_t i, int64_t size) { return i >= 0 && i < size; }

// Output row (or column) whose tap `tap` reads input row `in`, or -1 if there is none.
inline int64_t output_at(int64_t in, int64_t tap, int64_t stride, int64_t pad, int64_t dilate,
                         int64_t out_size) {
    const int64_t scaled = in + pad - tap * dilate;
    if (scaled < 0 || scaled % stride != 0 || scaled / stride >= out_size) return -1;
    return scaled / stride;
}

inline int64_t x_index(const Shape& s, int64_t b, int64_t c, int64_t h, int64_t w) {
    return ((b * s.channels + c) * s.height + h) * s.width + w;
}

// `c` counts the channels of the filter's group.
inline int64_t w_index(const Shape& s, int64_t m, int64_t c, int64_t p, int64_t q) {
    return ((m * s.group_channels + c) * s.kernel_h + p) * s.kernel_w + q;
}

inline int64_t y_index(const Shape& s, int64_t b, int64_t m, int64_t i, int64_t j) {
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
                sum += wide(x[x_index(s, b, first_channel + c, row, col)]) *
                       wide(w[w_index(s, m, c, p, q)]);
            }
            if (sum != sum) return sum;
        }
    return sum;
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
                sum += wide(dy[y_index(s, b, m, i, j)]) *
                       wide(w[w_index(s, m, c % s.group_channels, p, q)]);
            }
            if (sum != sum) return sum;
        }
    return sum;
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
                sum += wide(dy[y_index(s, b, m, i, j)]) *
                       wide(x[x_index(s, b, channel, row, col)]);
            }
            if (sum != sum) return sum;
        }
    return sum;
}

inline bool is_finite(double value) { return value * 0 == 0; }

// One direction of a convolution. `element` computes the output element at `place`, without bias
// and old contents.
struct Textbook {
    Shape s;
    const void *first, *second, *out;  // the inputs, in ece408.h's order, and the output
    double (*element)(const Textbook&, const void* place);

    double at(const void* place) const { return element(*this, place); }
    // The sum if it is finite, else the element at `place` by the textbook loop.
    double finite_or_textbook(double sum, const void* place) const {
        return is_finite(sum) ? sum : at(place);
    }
};

// The indices of the element at `place` in the output, from the output's last three sizes.
template <class T>
struct Indices {
    int64_t first, second, row, column;

    Indices(const Textbook& book, const void* place, int64_t planes, int64_t rows,
            int64_t columns) {
        const int64_t index = static_cast<const T*>(place) - static_cast<const T*>(book.out);
        const int64_t line = index / columns, plane = line / rows;
        first = plane / planes, second = plane % planes, row = line % rows;
        column = index % columns;
    }
};

template <class T>
double forward_element(const Textbook& book, const void* place) {
    const Shape& s = book.s;
    const Indices<T> at(book, place, s.filters, s.out_height, s.out_width);
    return output_element(s, static_cast<const T*>(book.first), static_cast<const T*>(book.second),
                          at.first, at.second, at.row, at.column);
}

template <class T>
double data_element(const Textbook& book, const void* place) {
    const Shape& s = book.s;
    const Indices<T> at(book, place, s.channels, s.height, s.width);
    return input_gradient(s, static_cast<const T*>(book.first), static_cast<const T*>(book.second),
                          at.first, at.second, at.row, at.column);
}

template <class T>
double weight_element(const Textbook& book, const void* place) {
    const Shape& s = book.s;
    const Indices<T> at(book, place, s.group_channels, s.kernel_h, s.kernel_w);
    return weight_gradient(s, static_cast<const T*>(book.first), static_cast<const T*>(book.second),
                           at.first, at.second, at.row, at.column);
}

// Computes the non-finite ones of `count` sums again. Sums are `step` apart, their elements
// `out_step` apart from `out` on.
template <class Sum, class T>
void recompute_nonfinite(const Textbook& book, Sum* sums, int64_t step, int64_t count, const T* out,
                         int64_t out_step) {
    for (int64_t k = 0; k < count; ++k)
        sums[k * step] = static_cast<Sum>(book.finite_or_textbook(wide(sums[k * step]), out + k * out_step));
}

}  // namespace
}  // namespace ece408
