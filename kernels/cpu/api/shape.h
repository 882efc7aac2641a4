// Sizes that all kernels derive from a problem, and its validity.
//
// Everything is in an anonymous namespace: files that include this are compiled for different
// instruction sets, and the linker must not merge their copies of an inline function.
#pragma once

#include "api/ece408.h"

namespace ece408 {
namespace {

struct Shape : ece408_problem {
    int64_t out_height, out_width;
    int64_t group_channels, group_filters;
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t out_size(int64_t size, int64_t kernel, int64_t stride, int64_t pad, int64_t dilate) {
    const int64_t spare = size + 2 * pad - (dilate * (kernel - 1) + 1);
    return spare < 0 ? 0 : spare / stride + 1;
}

// Limits: sizes that MXNet's arrays can have, and arrays, with borders, that an address can reach.
// So nothing that kernels derive from a problem overflows.
constexpr int64_t kMostSize = INT32_MAX;
constexpr int64_t kMostElements = int64_t{1} << 47;

inline bool are_few(int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t factors[] = {b, c, d};
    int64_t product = a;
    for (int64_t factor : factors) {
        if (product > kMostElements / factor) return false;
        product *= factor;
    }
    return true;
}

inline bool valid(const ece408_problem& p) {
    const int64_t positive[] = {p.batch,    p.channels, p.height,   p.width,
                                p.filters,  p.kernel_h, p.kernel_w, p.stride_h,
                                p.stride_w, p.dilate_h, p.dilate_w, p.groups};
    for (int64_t value : positive)
        if (value < 1 || value > kMostSize) return false;
    if (p.pad_h < 0 || p.pad_h > kMostSize || p.pad_w < 0 || p.pad_w > kMostSize) return false;
    if (p.channels % p.groups != 0 || p.filters % p.groups != 0) return false;
    const int64_t rows = out_size(p.height, p.kernel_h, p.stride_h, p.pad_h, p.dilate_h);
    const int64_t columns = out_size(p.width, p.kernel_w, p.stride_w, p.pad_w, p.dilate_w);
    if (rows < 1 || columns < 1) return false;
    return are_few(p.batch, p.channels, p.height + 2 * p.pad_h, p.width + 2 * p.pad_w) &&
           are_few(p.filters, p.channels / p.groups, p.kernel_h, p.kernel_w) &&
           are_few(p.batch, p.filters, rows, columns);
}

inline Shape derive(const ece408_problem& p) {
    Shape s;
    static_cast<ece408_problem&>(s) = p;
    s.out_height = out_size(p.height, p.kernel_h, p.stride_h, p.pad_h, p.dilate_h);
    s.out_width = out_size(p.width, p.kernel_w, p.stride_w, p.pad_w, p.dilate_w);
    s.group_channels = p.channels / p.groups;
    s.group_filters = p.filters / p.groups;
    return s;
}

// The gradient for x as a convolution of dy: x and y swapped. The caller sets the border and the
// steps.
inline Shape gradient_shape(const Shape& s) {
    Shape swapped = s;
    swapped.channels = s.filters, swapped.filters = s.channels;
    swapped.group_channels = s.group_filters, swapped.group_filters = s.group_channels;
    swapped.height = s.out_height, swapped.width = s.out_width;
    swapped.out_height = s.height, swapped.out_width = s.width;
    return swapped;
}

inline int64_t weights(const ece408_problem& p) {
    return p.filters * (p.channels / p.groups) * p.kernel_h * p.kernel_w;
}

// Whether an array is larger than a core's share of the last-level cache, so that its first bytes
// have left the cache when they are used again.
inline bool exceeds_caches(int64_t bytes) { return bytes > int64_t{32} << 20; }

inline bool has_unit_steps(const ece408_problem& p) {
    return p.stride_h == 1 && p.stride_w == 1 && p.dilate_h == 1 && p.dilate_w == 1 &&
           p.groups == 1;
}

// conv_bwd_w_dot.cpp uses Winograd's F(3,2) along rows from this many products per element of x and
// of dy on, which make up for its transforms (with 72, 8 channels by 3x3, both ways take the same
// time), and from this many pixels on, which make up for more sums of lanes. Sums in double do not
// use it: their results must not depend on rows of other magnitudes.
constexpr int64_t kWinogradProducts = 72, kWinogradPixels = 512;

inline bool bwd_w_uses_winograd(const Shape& s, bool in_double) {
    const bool fits = s.stride_h == 1 ? s.kernel_h == 3 || s.kernel_h == 5 || s.kernel_h == 7
                                      : s.kernel_h >= 2 * s.stride_h;
    const int64_t window = s.kernel_h * s.kernel_w;
    return fits && !in_double && s.dilate_h == 1 && s.out_height > 1 &&
           s.group_channels * window >= kWinogradProducts &&
           s.group_filters * window / (s.stride_h * s.stride_w) >= kWinogradProducts &&
           s.batch * s.out_height * s.out_width >= kWinogradPixels;
}

// Pixels of a plane up to which `depthwise` treats a tap's input as a shifted plane, in the
// gradient for w.
constexpr int64_t kSmallPlane = 256;

inline bool is_shifted_plane(const Shape& s) {
    return s.stride_h == 1 && s.out_width == s.width && s.out_height * s.out_width <= kSmallPlane;
}

// A 1x1 kernel without border: an image is one row of the pixels that the strides select.
inline bool is_flat(const ece408_problem& p) {
    return p.kernel_h == 1 && p.kernel_w == 1 && p.pad_h == 0 && p.pad_w == 0;
}

// Whether an image has one window, which is the whole image.
inline bool is_one_window(const ece408_problem& p) {
    return p.kernel_h == p.height && p.kernel_w == p.width && p.pad_h == 0 && p.pad_w == 0 &&
           p.dilate_h == 1 && p.dilate_w == 1;
}

// Odd tiles: with 16 lanes, tiles of 8 filters by three vectors leave registers for one extra
// pixel, whose sums of 8 filters are a vector. So planes of 7x7 and 14x14 pixels are tiles of 49.
constexpr int64_t kOddFilters = 8, kOddVectors = 3;

// Whether all filters of a 1x1 kernel are in blocks for odd tiles.
inline bool is_in_eights(const Shape& s, int64_t lanes) {
    return lanes == 16 && s.kernel_h == 1 && s.kernel_w == 1 && s.filters % kOddFilters == 0;
}

// The number of odd tiles that sums the plane of a 1x1 kernel with the fewest products, or 0.
inline int64_t odd_tiles(const Shape& s, int64_t lanes) {
    const int64_t plane = s.out_height * s.out_width, tiles = plane / (kOddVectors * lanes);
    const int64_t odd = plane - tiles * kOddVectors * lanes;
    const int64_t products = tiles * kOddVectors * kOddFilters + odd;
    const bool pays = products < kOddFilters * divide_up(plane, lanes);
    return is_in_eights(s, lanes) && odd <= tiles && pays ? odd : 0;
}

// That row, as an image of its own.
inline ece408_problem flattened(ece408_problem p) {
    if (is_flat(p)) {
        const Shape s = derive(p);
        p.width = s.out_height * s.out_width;
        p.height = p.stride_h = p.stride_w = 1;
    }
    return p;
}

}  // namespace
}  // namespace ece408
