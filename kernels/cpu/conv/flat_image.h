// Flat images: a layout in which a convolution is a sum of shifted copies of the image.
//
// Each channel is padded, and its rows and columns are divided by their phase modulo the stride, so
// that the pixels that one tap reads for all outputs are adjacent, row by row:
//
//     y[i, j] = sum over c, p, q of w[c, p, q] * flat[tap(c, p, q) + i * row + j]
//
// Rows are a little longer than the output's; columns beyond the output's width are not copied. The
// gradient for x is also such a sum, of dy with zeros between its pixels.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "api/shape.h"

namespace ece408 {
namespace {

// Elements of flat images per pass, unless threads take whole images.
constexpr int64_t kPassElements = 4 << 20;

// Images of `image` elements that are copied before threads compute with them: more images mean
// fewer waits.
inline int64_t images_per_pass(int64_t batch, int64_t image) {
    const int64_t most = kPassElements / image;
    return most < 1 ? 1 : most < batch ? most : batch;
}

// A convolution over images of one group's channels. Source pixels are `spread` apart with zeros in
// between (1: none); a negative pad crops.
struct Sweep : Shape {
    int64_t spread_h, spread_w;
};

inline Sweep forward_sweep(const Shape& s) {
    Sweep sweep = {s, 1, 1};
    // The stride of a single output row does not matter, however large it is.
    if (s.out_height == 1) sweep.stride_h = 1;
    if (s.out_width == 1) sweep.stride_w = 1;
    return sweep;
}

// The gradient for x: dy, spread by the stride, convolved with the rotated kernel, so that each
// pixel of x meets every output that read it.
inline Sweep backward_sweep(const Shape& s) {
    const Sweep forward = forward_sweep(s);
    Sweep sweep = {gradient_shape(s), forward.stride_h, forward.stride_w};
    sweep.stride_h = sweep.stride_w = 1;
    sweep.pad_h = (s.kernel_h - 1) * s.dilate_h - s.pad_h;
    sweep.pad_w = (s.kernel_w - 1) * s.dilate_w - s.pad_w;
    return sweep;
}

struct FlatImage {
    int64_t row;      // pixels in a row
    int64_t phase;    // pixels of one phase's plane
    int64_t channel;  // pixels of a channel, all phases
    int64_t length;   // from the first output pixel to behind the last one
};

inline FlatImage flat_image(const Sweep& s) {
    FlatImage f;
    f.row = s.out_width + (s.kernel_w - 1) * s.dilate_w / s.stride_w;
    const int64_t rows = s.out_height + (s.kernel_h - 1) * s.dilate_h / s.stride_h;
    f.phase = rows * f.row;
    f.channel = f.phase * s.stride_h * s.stride_w;
    f.length = (s.out_height - 1) * f.row + s.out_width;
    return f;
}

// Offset of tap (p, q) of a channel for output (0, 0).
inline int64_t tap_offset(const Sweep& s, const FlatImage& f, int64_t p, int64_t q) {
    const int64_t y = p * s.dilate_h, x = q * s.dilate_w;
    const int64_t phase = y % s.stride_h * s.stride_w + x % s.stride_w;
    return phase * f.phase + y / s.stride_h * f.row + x / s.stride_w;
}

// Index in the source of padded coordinate `at`, or -1 for a zero.
inline int64_t source_index(int64_t at, int64_t pad, int64_t spread, int64_t size) {
    const int64_t i = at - pad;
    if (i < 0 || i % spread != 0 || i / spread >= size) return -1;
    return i / spread;
}

template <class T, class Sum>
void fill_row(const Sweep& s, const T* source, int64_t first, int64_t count, Sum* out) {
    if (s.stride_w == 1 && s.spread_w == 1) {
        int64_t begin = s.pad_w > 0 ? s.pad_w : 0;
        int64_t end = s.pad_w + s.width;
        if (end < 0) end = 0;
        if (end > count) end = count;
        if (begin > end) begin = end;
        for (int64_t k = 0; k < begin; ++k) out[k] = 0;
        for (int64_t k = begin; k < end; ++k) out[k] = source[k - s.pad_w];
        for (int64_t k = end; k < count; ++k) out[k] = 0;
        return;
    }
    if (s.spread_w == 1) {
        // Pixel k is source[from + k * stride_w], zero outside.
        const int64_t from = first - s.pad_w;
        int64_t begin = from < 0 ? (-from + s.stride_w - 1) / s.stride_w : 0;
        int64_t end = s.width > from ? (s.width - from + s.stride_w - 1) / s.stride_w : 0;
        if (end > count) end = count;
        if (begin > end) begin = end;
        for (int64_t k = 0; k < begin; ++k) out[k] = 0;
        if (s.stride_w == 2)  // the compiler vectorises this stride
            for (int64_t k = begin; k < end; ++k) out[k] = source[from + 2 * k];
        else
            for (int64_t k = begin; k < end; ++k) out[k] = source[from + k * s.stride_w];
        for (int64_t k = end; k < count; ++k) out[k] = 0;
        return;
    }
    for (int64_t k = 0; k < count; ++k) {
        const int64_t x = source_index(first + k * s.stride_w, s.pad_w, s.spread_w, s.width);
        out[k] = x < 0 ? Sum(0) : source[x];
    }
}

// Whether some tap of a kernel reads pixels of a phase.
inline bool has_taps(int64_t phase, int64_t kernel, int64_t stride, int64_t dilate) {
    if (dilate == 1) return phase < kernel;
    for (int64_t p = 0; p < kernel && p < stride; ++p)
        if (p * dilate % stride == phase) return true;
    return false;
}

// Copies one row phase of a channel to its place. Phases without taps are not written.
template <class T, class Sum>
void fill_rows(const Sweep& s, const FlatImage& f, const T* source, int64_t phase_y,
               Sum* channel) {
    if (!has_taps(phase_y, s.kernel_h, s.stride_h, s.dilate_h)) return;
    const int64_t rows = f.phase / f.row;
    for (int64_t phase_x = 0; phase_x < s.stride_w; ++phase_x) {
        if (!has_taps(phase_x, s.kernel_w, s.stride_w, s.dilate_w)) continue;
        Sum* out = channel + (phase_y * s.stride_w + phase_x) * f.phase;
        for (int64_t k = 0; k < rows; ++k, out += f.row) {
            const int64_t y = source_index(phase_y + k * s.stride_h, s.pad_h, s.spread_h, s.height);
            if (y < 0)
                memset(out, 0, static_cast<size_t>(f.row) * sizeof(Sum));
            else
                fill_row(s, source + y * s.width, phase_x, f.row, out);
        }
    }
}

template <class T, class Sum>
void fill_channel(const Sweep& s, const FlatImage& f, const T* source, Sum* out) {
    for (int64_t phase_y = 0; phase_y < s.stride_h; ++phase_y)
        fill_rows(s, f, source, phase_y, out);
}

}  // namespace
}  // namespace ece408
