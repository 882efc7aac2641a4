// Geometry of conv_fwd_oc.h: the taps of each output phase, and the layout of the padded source.
#pragma once

#include "conv/flat_image.h"
#include "host/buffer.h"
#include "micro/lanes.h"
#include "micro/vector.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// The register tile: output pixels by vectors of output channels.
constexpr int kOcVectors = 2;
constexpr int kOcPixels = ECE408_LANES == 16 ? 14 : ECE408_LANES == 8 ? 6 : 4;
// Products per partial sum. Short partial sums lose less to rounding.
constexpr int64_t kSumBlock = 256;
// Prefetch distance in taps; offset lists are padded by as many entries.
constexpr int64_t kPrefetchDistance = 24;
// Components in two dimensions.
constexpr int kComponents2d = kComponents * kComponents;
static_assert(kOcPixels % kMaxF23Dilation == 0, "tiles hold whole groups of pairs");

// One phase of the output: pixels (row + i * out_step_h, column + j * out_step_w) and the taps they
// sum.
struct Phase {
    int64_t row, column, rows, columns;
    int64_t taps, first_tap;  // a range of OcConv::tap
};

struct OcTap {
    int64_t p, q;          // position in the kernel
    int64_t down, across;  // output (i, j) reads source pixel (i * step_h + down, j * step_w + across)
};

// Winograd F(2,3) for the kernel rows of one residue modulo the stride. `before` counts the
// transformed kernel rows of lower residues in each component, `kept_before` their stored
// components.
struct Residue {
    F23 f23;
    int64_t before[kComponents], kept_before;

    int64_t kept() const { return f23.is_single() ? 2 : 3 + f23.kernel % 2; }
    // Index of component t among the stored components.
    int64_t place(int t) const { return kept_before + (f23.is_single() && t > 0 ? 1 : t); }
};

// A convolution over the images of one group's channels. With `along_columns`, the kernel's only
// row is treated as its column.
struct OcConv : Shape {
    int64_t step_h, step_w;          // source pixels per output pixel
    int64_t out_step_h, out_step_w;  // output pixels per pixel of a phase
    int64_t top, left, rows, row;    // the padded source: border, rows, and
                                     // the length of a row of each column residue
    int64_t window;  // taps of all phases
    int64_t phases;
    bool winograd, winograd_2d;  // Winograd F(2,3) in one dimension, and in two
    bool along_columns;          // one dimension, along columns
    F23 across;                  // F(2,3) along columns
    int64_t residues, gap_h;     // row residues modulo the stride; rows from y0 to y1 (the dilation)
    int64_t gap_w;               // in two dimensions: columns from y0 to y1
    int64_t row_pairs, starts;   // pairs of output rows; rows of one component of one residue
    int64_t direction;           // step from a tap to the next in the weights: -1 if the kernel is rotated
    Buffer<Phase> phase;
    Buffer<OcTap> tap;
    Buffer<Residue> residue;

    // First output row of pair n; also the first source row, divided by the stride, of row n of a
    // component.
    int64_t first_of(int64_t n) const { return n / gap_h * 2 * gap_h + n % gap_h; }
    bool transforms_rows() const { return winograd && !along_columns; }
    bool transforms_columns() const { return winograd_2d || along_columns; }
};

// Allocates the lists of a convolution of this shape. False without memory.
inline bool allocate(const Shape& shape, int64_t phases, int64_t window, OcConv* conv) {
    static_cast<Shape&>(*conv) = shape;
    conv->phase = Buffer<Phase>(phases);
    conv->tap = Buffer<OcTap>(window);
    conv->phases = phases;
    conv->window = 0;
    conv->winograd = conv->winograd_2d = conv->along_columns = false;
    return conv->phase && conv->tap;
}

// Computes the padded source's border and size from all taps.
inline void pad_source(OcConv* d) {
    int64_t low_h = 0, low_w = 0, high_h = d->height - 1, high_w = d->width - 1;
    for (int64_t n = 0; n < d->phases; ++n) {
        const Phase& phase = d->phase[n];
        for (int64_t t = phase.first_tap; t < phase.first_tap + phase.taps; ++t) {
            const OcTap& tap = d->tap[t];
            const int64_t last_h = (phase.rows - 1) * d->step_h + tap.down;
            const int64_t last_w = (phase.columns - 1) * d->step_w + tap.across;
            if (tap.down < low_h) low_h = tap.down;
            if (tap.across < low_w) low_w = tap.across;
            if (last_h > high_h) high_h = last_h;
            if (last_w > high_w) high_w = last_w;
        }
    }
    d->top = -low_h;
    d->left = -low_w;
    d->rows = high_h - low_h + 1;
    d->row = (high_w - low_w) / d->step_w + 1;
}

inline bool describe_forward(const Sweep& s, OcConv* d) {
    if (!allocate(s, 1, s.kernel_h * s.kernel_w, d)) return false;
    d->step_h = s.stride_h, d->step_w = s.stride_w;
    d->out_step_h = d->out_step_w = 1;
    for (int64_t p = 0; p < s.kernel_h; ++p)
        for (int64_t q = 0; q < s.kernel_w; ++q)
            d->tap[d->window++] = {p, q, p * s.dilate_h - s.pad_h, q * s.dilate_w - s.pad_w};
    d->phase[0] = {0, 0, s.out_height, s.out_width, d->window, 0};
    pad_source(d);
    return true;
}

inline int64_t floor_divide(int64_t a, int64_t b) { return (a - ((a % b + b) % b)) / b; }

// The gradient for the source of forward pass `s`.
inline bool describe_backward_data(const Sweep& s, OcConv* d) {
    if (!allocate(gradient_shape(s), s.stride_h * s.stride_w, s.kernel_h * s.kernel_w, d))
        return false;
    d->step_h = d->step_w = 1;
    d->out_step_h = s.stride_h, d->out_step_w = s.stride_w;
    for (int64_t n = 0; n < d->phases; ++n) {
        Phase& phase = d->phase[n];
        phase = {n / s.stride_w, n % s.stride_w, 0, 0, 0, d->window};
        phase.rows = (s.height - phase.row + s.stride_h - 1) / s.stride_h;
        phase.columns = (s.width - phase.column + s.stride_w - 1) / s.stride_w;
        for (int64_t p = 0; p < s.kernel_h; ++p)
            for (int64_t q = 0; q < s.kernel_w; ++q) {
                const int64_t y = phase.row + s.pad_h - p * s.dilate_h;
                const int64_t x = phase.column + s.pad_w - q * s.dilate_w;
                if (y % s.stride_h != 0 || x % s.stride_w != 0) continue;
                d->tap[d->window++] = {p, q, floor_divide(y, s.stride_h),
                                       floor_divide(x, s.stride_w)};
            }
        phase.taps = d->window - phase.first_tap;
        if (phase.rows < 0) phase.rows = 0;
        if (phase.columns < 0) phase.columns = 0;
    }
    pad_source(d);
    return true;
}

// Fills the row residues; the first one has the most taps. Returns the totals of transformed kernel
// rows of each component and of stored components.
inline Residue fill_residues(const Sweep& s, OcConv* d) {
    Residue all = {};
    for (int64_t r = 0; r < d->residues; ++r) {
        all.f23 = f23_of_residue(s.kernel_h, s.stride_h, r, s.out_height);
        d->residue[r] = all;
        for (int t = 0; t < kComponents; ++t) all.before[t] += all.f23.groups_in(t);
        all.kept_before += all.kept();
    }
    return all;
}

// Winograd F(2,3): the forward pass, or with `rotated` weights and the backward sweep the gradient
// for x. Each component is a phase, whose taps are groups of kernel rows and, in two dimensions,
// groups of columns. The source is the padded image in two dimensions; in one dimension its row
// components one below the other, column residues side by side.
inline bool describe_winograd(const Sweep& s, bool rotated, bool winograd_2d, OcConv* d) {
    const F23 across = f23_of(s.kernel_w, s.out_width);
    const bool along_columns = !winograd_2d && s.kernel_h == 1;
    Sweep taken = s;
    if (along_columns) taken.kernel_h = s.kernel_w, taken.kernel_w = 1;
    if (!allocate(taken, winograd_2d ? kComponents2d : kComponents, 0, d)) return false;
    d->residues = taken.stride_h < taken.kernel_h ? taken.stride_h : taken.kernel_h;
    d->residue = Buffer<Residue>(d->residues);
    if (!d->residue) return false;
    const Residue all = fill_residues(taken, d);
    const F23& f23 = d->residue[0].f23;
    d->winograd = true, d->winograd_2d = winograd_2d, d->along_columns = along_columns;
    d->across = across;
    d->gap_h = s.dilate_h, d->gap_w = winograd_2d ? s.dilate_w : 1;
    d->row_pairs = along_columns ? s.out_height : d->gap_h * divide_up(s.out_height, 2 * d->gap_h);
    d->starts = along_columns ? s.out_height : d->row_pairs + (f23.groups - 1) * d->gap_h;
    d->direction = rotated ? -1 : 1;
    d->step_h = winograd_2d ? 2 : 1, d->step_w = winograd_2d ? 2 : s.stride_w;
    d->out_step_h = d->out_step_w = 1;
    d->top = s.pad_h, d->left = s.pad_w;
    d->rows = winograd_2d ? 2 * (d->row_pairs + f23.groups * d->gap_h) : all.kept_before * d->starts;
    const int64_t row = s.out_width + (s.kernel_w - 1) * s.dilate_w / s.stride_w;
    const int64_t column_pairs = d->gap_w * divide_up(s.out_width, 2 * d->gap_w);
    d->row = winograd_2d      ? column_pairs + across.groups * d->gap_w
             : along_columns  ? across.starts()
             : s.stride_w > 1 ? round_up(row, kLanes)
                              : row;
    const int64_t columns = d->transforms_columns() ? column_pairs : s.out_width;
    for (int n = 0; n < d->phases; ++n) {
        const int64_t groups = all.before[winograd_2d ? n / kComponents : n];
        const int64_t taps = groups * (winograd_2d ? across.groups_in(n % kComponents) : taken.kernel_w);
        d->phase[n] = {0, 0, d->row_pairs, columns, taps, d->window};
        d->window += taps;
    }
    return true;
}

}  // namespace
}  // namespace ece408
