// Winograd's F(2,3): two outputs of a one-dimensional convolution with three tenths fewer products
// (A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks", 2016; S. Winograd,
// "Arithmetic Complexity of Computations", 1980). Here along rows; along columns it is the same,
// and in two dimensions, one nested in the other, half the products are left.
//
// Two successive output rows y0 and y1, of three taps g and four input rows d, are
//
//     y0 = Z0 + Z1 + Z2     Z0 = g0 (d0 - d2)                  Z1 = (g0 + g1 + g2) / 2 (d1 + d2)
//     y1 = Z1 - Z2 - Z3     Z2 = (g0 - g1 + g2) / 2 (d2 - d1)  Z3 = g2 (d1 - d3)
//
// 4 products instead of 6, and with two taps (g2 = 0) 3 instead of 4. A kernel of odd height is
// divided into groups of two taps and a last group of three, a kernel of even height into groups of
// two: 7 products instead of 10 for five taps, 10 instead of 14 for seven. All groups begin at an
// even tap, so the input transform (differences and sums of rows) is the same for all groups,
// filters and output rows, and is made once per image. Its result are four components of half the
// height; each Z is an ordinary convolution of one component. The output transform is applied once
// to the sums over groups, columns and channels.
//
// With a stride, the taps of each residue modulo the stride are a kernel of their own for the rows
// of that residue, and the Z are also summed over residues. A residue with a single tap has y0 = Z0
// = g0 d0 and y1 = -Z3 = g0 d1. Seven taps with stride 2 are four and three: 10 products instead of
// 14. With dilation, y1 is that many rows below y0.
//
// The only fractions are halves, in two dimensions quarters, so small whole numbers stay exact. If
// the last group has three taps, every output uses only rows of its own window; if it has two, d2
// also meets y0. An infinity in d2 then makes y0 NaN, and sums that are not finite are computed
// again (textbook.h).
#pragma once

#include <stdint.h>

namespace ece408 {
namespace {

constexpr int kComponents = 4;

struct F23 {
    int64_t kernel, groups, out_pairs;  // taps, groups of taps, pairs of outputs

    int64_t starts() const { return out_pairs + groups - 1; }  // rows or columns of a component
    bool is_single() const { return kernel == 1; }
    bool has_third(int64_t group) const { return kernel % 2 == 1 && group == groups - 1; }
    // Component 3 has the third tap only.
    int64_t groups_in(int t) const {
        if (is_single()) return t == 0 || t == 3;
        return t < 3 ? groups : kernel % 2;
    }
    int64_t first_group(int t) const { return groups - groups_in(t); }
    // Transformed taps of all components.
    int64_t taps() const { return is_single() ? 2 : 3 * groups + kernel % 2; }
};

// The largest window, in taps, of conv_fwd_oc.h with F(2,3).
constexpr int64_t kMaxF23Taps = 121;
// Its largest dilation of columns in two dimensions.
constexpr int64_t kMaxF23Dilation = 2;

inline bool is_f23_kernel(int64_t kernel) { return kernel >= 3 && kernel % 2 == 1; }

inline F23 f23_of(int64_t kernel, int64_t outputs) {
    return {kernel, kernel == 1 ? 1 : kernel / 2, (outputs + 1) / 2};
}

// For the taps of residue `r` modulo the stride, which must have some.
inline F23 f23_of_residue(int64_t kernel, int64_t stride, int64_t r, int64_t outputs) {
    return f23_of((kernel - r + stride - 1) / stride, outputs);
}

// Weight transform: the weight of component t for a group of taps. Component 3 is negated, so that
// y1 is a sum.
template <class Sum>
inline Sum transform_weight(int t, Sum g0, Sum g1, Sum g2) {
    if (t == 0) return g0;
    if (t == 1) return 0.5f * ((g0 + g2) + g1);
    if (t == 2) return 0.5f * ((g0 + g2) - g1);
    return -g2;
}

// Input transform of four rows; the components are `step` apart.
template <class Sum>
inline void transform_input(Sum d0, Sum d1, Sum d2, Sum d3, Sum* out, int64_t step) {
    out[0] = d0 - d2;
    out[step] = d1 + d2;
    out[2 * step] = d2 - d1;
    out[3 * step] = d1 - d3;
}

// Output transform: replaces the first two of four component sums, `step` apart, by the two output
// rows.
template <class Sum>
inline void transform_output(Sum* sums, int64_t step) {
    const Sum z1 = sums[step], z2 = sums[2 * step];
    sums[0] += z1 + z2;
    sums[step] = (z1 - z2) + sums[3 * step];
}

}  // namespace
}  // namespace ece408
