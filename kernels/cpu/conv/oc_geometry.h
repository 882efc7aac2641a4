// Geometry of conv_fwd_oc.h: where outputs find the rows of the source that they sum.
#pragma once

#include "conv/flat_image.h"
#include "host/buffer.h"
#include "micro/lanes.h"
#include "micro/vector.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// Vectors of filters, and pixels, of a tile.
constexpr int kOcVectors = 2;
constexpr int kOcPixels = ECE408_LANES == 16 ? 14 : ECE408_LANES == 8 ? 6 : 4;
// Products after which a partial sum ends, so that long sums lose less to rounding.
constexpr int64_t kSumBlock = 256;
// A product asks for the pixels of the one that comes so many later. So lists of places have so many more.
constexpr int64_t kPrefetchDistance = 24;
// Blocks of filters that a thread computes with the same pixels, as long as these are in the first cache.
constexpr int64_t kBlocksPerMacroTile = 8;
constexpr int kComponents2d = kComponents * kComponents;
static_assert(kOcPixels % kMaxF23Dilation == 0, "tiles have whole groups of squares");
// Of a stretch of these: the most pixels, numbers that are laid out, and sums of blocks that are kept. With 16
// lanes there is room for three tiles of squares, for which a block's weights are read from memory once.
constexpr int64_t kMacroTilePixels = 256, kMacroTileSums = 4096;
constexpr int64_t kMacroTilePacked =
    ECE408_LANES == 16 ? 3 * kComponents2d * kSumBlock * kOcPixels : 3 << 15;
// Without domains, and with vectors of less than 16 lanes, pixels are laid out for so many of a thread's
// blocks, where windows have few pixels side by side, or tiles that end with rows would be less than two
// thirds of the largest ones.
constexpr int64_t kPackPixelsBlocks = 8;
// What a tile's laying out, and reading a block's weights, cost beside a tile's products with a block.
constexpr double kPackPixelsCost = 0.6, kReadWeightsCost = 1;
// Numbers that fill whole lines of a cache, of any type.
constexpr int64_t kLineElements = 16;
// Threads up to which all are likely to be equally fast.
constexpr int kFewThreads = 4;
// The most pieces for each thread.
constexpr int64_t kChunksPerThread = 8;
// Pixels of a batch up to which threads pack weights that are not kept when they come to them, so that these
// stay in a core's cache: those of a partial sum, for all pixels, or those of a block. With more pixels all
// are packed before any are read.
constexpr int64_t kPartPackPixels = 1024, kBlockPackPixels = 400;
// The most numbers of the padded source for each tap where parts are packed: each thread reads all pixels for
// each of its blocks, and with several taps computes longer with what it reads.
constexpr int64_t kPartPackSource = 1 << 19;
// The most numbers that threads pad each for itself, and the most that are one piece of memory.
constexpr int64_t kPrivateElements = 4 << 20, kOneBufferElements = 4 << 20;
// Pixels of the source that are asked for before they are copied: memory is slow to answer, and what it answers
// by itself is too late for images of many short rows.
constexpr int64_t kSourcePrefetch = 2048;
// What a number costs that is padded, and one of weights, beside a product's pixel with a block.
constexpr double kPadCost = 0.8, kLoadWeightCost = 0.4;
// A block's weights for pairs, from which on they are packed in parts: fewer stay in a core's cache.
constexpr int64_t kPartPackWinograd = 1 << 17;

// The output pixels (row + i * row_step, column + j * column_step), and the taps they sum.
struct Phase {
    int64_t row, column, rows, columns;
    int64_t taps, first_tap;  // in OcPlan::window: this phase's part
};

struct OcTap {
    int64_t p, q;          // of the kernel
    int64_t down, across;  // from pixel (i, j) of the phase, the source's (i * step + down, ...)
};

// The taps of a residue of rows modulo the stride, by pairs. Of the residues before it there are so many
// rows of taps in each domain, and so many domains that are kept.
struct Residue {
    F23 f23;
    int64_t before[kComponents], kept_before;

    int64_t kept() const { return f23.is_single() ? 2 : 3 + f23.kernel % 2; }
    // Of those, the place of domain t.
    int64_t place(int t) const { return kept_before + (f23.is_single() && t > 0 ? 1 : t); }
};

// A sum over channels and taps for images of one group's channels. By columns, the kernel's row is a column here.
struct OcConv : Shape {
    int64_t step_h, step_w;          // of the source from output pixel to output pixel
    int64_t out_step_h, out_step_w;  // of the output from pixel to pixel of a phase
    int64_t top, left, rows, row;    // the padded source: its border and its size; of each residue
                                     // of columns modulo the step, a row has so many
    int64_t window;                  // taps of all phases
    int64_t phases;
    bool winograd, winograd_2d;   // of rows, and of columns as well;
    bool along_columns;             // or of columns only
    F23 across;                // of columns: how these are taken
    int64_t residues, gap_h;     // of pairs: of rows modulo the stride, and the rows from y0 to y1,
    int64_t gap_w;        // of squares, the columns
    int64_t row_pairs, starts;   // the pairs of rows of a column, and the rows of a domain of a residue,
    int64_t direction;           // and the step from a tap of the weights to the next one
    Buffer<Phase> phase;
    Buffer<OcTap> tap;
    Buffer<Residue> residue;

    // The first row of the output of pair n; of the source, divided by the stride, that of a domain's row.
    int64_t first_of(int64_t n) const { return n / gap_h * 2 * gap_h + n % gap_h; }
    bool transforms_rows() const { return winograd && !along_columns; }
    bool transforms_columns() const { return winograd_2d || along_columns; }
};

// A sum for images of such a shape. False without memory.
inline bool allocate(const Shape& shape, int64_t phases, int64_t window, OcConv* conv) {
    static_cast<Shape&>(*conv) = shape;
    conv->phase = Buffer<Phase>(phases);
    conv->tap = Buffer<OcTap>(window);
    conv->phases = phases;
    conv->window = 0;
    conv->winograd = conv->winograd_2d = conv->along_columns = false;
    return conv->phase && conv->tap;
}

// The border and size of the padded source, from all taps.
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

// `s` describes the forward pass; this, the gradient for its source.
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

// The residues of rows, of which the first one has the most taps. Returns the rows of taps of each domain and
// the domains that are kept, of all.
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

// Forward or, with `turned` weights and its own sweep, the gradient for x. Phases are domains, whose taps
// are groups of rows and, of squares, groups of columns. The source of squares is the image with a border,
// that of pairs its domains, one under the other, each residue of columns modulo the stride by itself.
inline bool describe_winograd(const Sweep& s, bool turned, bool winograd_2d, OcConv* d) {
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
    d->direction = turned ? -1 : 1;
    d->step_h = winograd_2d ? 2 : 1, d->step_w = winograd_2d ? 2 : s.stride_w;
    d->out_step_h = d->out_step_w = 1;
    d->top = s.pad_h, d->left = s.pad_w;
    d->rows = winograd_2d ? 2 * (d->row_pairs + f23.groups * d->gap_h) : all.kept_before * d->starts;
    const int64_t row = s.out_width + (s.kernel_w - 1) * s.dilate_w / s.stride_w;
    const int64_t column_pairs = d->gap_w * divide_up(s.out_width, 2 * d->gap_w);
    d->row = winograd_2d       ? column_pairs + across.groups * d->gap_w
             : along_columns     ? across.starts()
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
