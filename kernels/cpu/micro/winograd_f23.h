// Two outputs at a time with three tenths fewer products: Winograd's F(2, 3) (A. Lavin, S. Gray,
// "Fast Algorithms for Convolutional Neural Networks", 2016; S. Winograd, "Arithmetic Complexity of
// Computations", 1980), here by rows; by columns it is the same, and by both, one inside the other,
// half the products are left.
//
// Two output rows that follow each other, y0 and y1, of three taps g and four input rows d are
//
//     y0 = Z0 + Z1 + Z2     Z0 = g0 (d0 - d2)                  Z1 = (g0 + g1 + g2) / 2 (d1 + d2)
//     y1 = Z1 - Z2 - Z3     Z2 = (g0 - g1 + g2) / 2 (d2 - d1)  Z3 = g2 (d1 - d3)
//
// 4 products for 6, and of two taps, g2 = 0, 3 for 4. A kernel of odd height is cut into groups of
// two taps and a last one of three, of even height into groups of two: 7 products for 10 with five
// taps, 10 for 14 with seven. All groups begin at an even tap, so the differences and sums of rows are
// the same for all groups, filters and output rows, and are made once per image; they are four images
// of half the height, domains here, and each Z is an ordinary convolution of one of them. Sums over
// groups, columns and channels are taken of the Z, so y is put together once for all of them.
//
// With a stride, the taps of each residue modulo it are a kernel of their own for the rows of that
// residue, and the Z are sums over residues as well. A residue's single tap has y0 = Z0 = g0 d0 and
// y1 = -Z3 = g0 d1. Seven taps with stride 2 are four and three: 10 products for 14. With dilation,
// y1 is as many rows below y0.
//
// The only fractions are halves, by both rows and columns quarters: whole numbers stay exact, as
// long as they are small enough. If the last group has three taps, no row of the image meets an output
// that its own window does not reach; if it has two, d2 meets y0. An infinity there makes y0 NaN, and
// sums that are not finite are computed again (textbook.h).
#pragma once

#include <stdint.h>

namespace ece408 {
namespace {

constexpr int kComponents = 4;

struct F23 {
    int64_t kernel, groups, out_pairs;  // taps, groups of them, pairs of outputs

    int64_t starts() const { return out_pairs + groups - 1; }  // rows or columns of a domain
    bool is_single() const { return kernel == 1; }
    bool has_third(int64_t group) const { return kernel % 2 == 1 && group == groups - 1; }
    // Z3 is of the third tap only.
    int64_t groups_in(int t) const {
        if (is_single()) return t == 0 || t == 3;
        return t < 3 ? groups : kernel % 2;
    }
    int64_t first_group(int t) const { return groups - groups_in(t); }
    // Of all domains.
    int64_t taps() const { return is_single() ? 2 : 3 * groups + kernel % 2; }
};

// The largest window, in taps, that conv_fwd_oc.h takes by pairs or squares.
constexpr int64_t kMaxF23Taps = 121;
// The largest dilation of columns that it takes by squares.
constexpr int64_t kMaxF23Dilation = 2;

inline bool is_f23_kernel(int64_t kernel) { return kernel >= 3 && kernel % 2 == 1; }

inline F23 f23_of(int64_t kernel, int64_t outputs) {
    return {kernel, kernel == 1 ? 1 : kernel / 2, (outputs + 1) / 2};
}

// For the taps of residue `r` modulo the stride, of which there are some.
inline F23 f23_of_residue(int64_t kernel, int64_t stride, int64_t r, int64_t outputs) {
    return f23_of((kernel - r + stride - 1) / stride, outputs);
}

// The factor of domain t for a group's taps. The last one's sign is turned, so that y1 is a sum.
template <class Sum>
inline Sum transform_weight(int t, Sum g0, Sum g1, Sum g2) {
    if (t == 0) return g0;
    if (t == 1) return 0.5f * ((g0 + g2) + g1);
    if (t == 2) return 0.5f * ((g0 + g2) - g1);
    return -g2;
}

// A column of four rows of the image, for domains that lie `step` apart.
template <class Sum>
inline void transform_input(Sum d0, Sum d1, Sum d2, Sum d3, Sum* out, int64_t step) {
    out[0] = d0 - d2;
    out[step] = d1 + d2;
    out[2 * step] = d2 - d1;
    out[3 * step] = d1 - d3;
}

// The sums of the four domains, `step` apart, become the two rows' in the places of the first two.
template <class Sum>
inline void transform_output(Sum* sums, int64_t step) {
    const Sum z1 = sums[step], z2 = sums[2 * step];
    sums[0] += z1 + z2;
    sums[step] = (z1 - z2) + sums[3 * step];
}

}  // namespace
}  // namespace ece408
