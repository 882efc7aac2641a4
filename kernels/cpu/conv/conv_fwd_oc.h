// Convolutions with many filters and long sums: lanes are filters, pixels are broadcast.
//
// A register tile holds a few neighbouring output pixels by one or two vectors of filters. Every
// lane is used whatever the size of the plane and its stride, for the price of a transposition at
// the end, so this is for sums long enough to pay for it; conv_fwd_ow.h has pixels as lanes.
//
// The source is padded once per image, columns of each residue modulo the stride side by side; a tap is a
// displacement in it. The gradient for x of a strided convolution is one such sum for each residue of x's
// rows and columns modulo the stride, with only the taps that reach it, so that no zeros are multiplied.
//
// Kernels that are higher than their stride take two output rows at a time with fewer products, those of one row
// two columns, those without strides also squares of 2x2 outputs, as winograd_f23.h explains: there is one such
// sum for each of 4 or 16 domains of the source. The 4 are made of an image at once. The 16 are made of a few
// pixels at a time, as tiles that are read in order, for many filters; so a tile can reach from row to row, and
// small planes without domains are laid out like that as well.
#pragma once

#include "conv/flat_image.h"
#include "conv/textbook.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/epilogue.h"
#include "micro/interleave.h"
#include "micro/lanes.h"
#include "micro/row_copy.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// Vectors of filters, and pixels, of a tile.
constexpr int kDeepVectors = 2;
constexpr int kDeepPixels = ECE408_LANES == 16 ? 14 : ECE408_LANES == 8 ? 6 : 4;
// Products after which a partial sum ends, so that long sums lose less to rounding.
constexpr int64_t kDeepBlock = 256;
// A product asks for the pixels of the one that comes so many later. So lists of places have so many more.
constexpr int64_t kDeepSoon = 24;
// Blocks of filters that a thread computes with the same pixels, as long as these are in the first cache.
constexpr int64_t kDeepTogether = 8;
constexpr int kSquareDomains = kDomains * kDomains;
static_assert(kDeepPixels % kMostApart == 0, "tiles have whole groups of squares");
// Of a stretch of these: the most pixels, numbers that are laid out, and sums of blocks that are kept. With 16
// lanes there is room for three tiles of squares, for which a block's weights are read from memory once.
constexpr int64_t kDeepStretch = 256, kDeepSums = 4096;
constexpr int64_t kDeepFactors =
    ECE408_LANES == 16 ? 3 * kSquareDomains * kDeepBlock * kDeepPixels : 3 << 15;
// Without domains, and with vectors of less than 16 lanes, pixels are laid out for so many of a thread's
// blocks, where windows have few pixels side by side, or tiles that end with rows would be less than two
// thirds of the largest ones.
constexpr int64_t kDeepLaidOutBlocks = 8;
// What a tile's laying out, and reading a block's weights, cost beside a tile's products with a block.
constexpr double kDeepLayingOut = 0.6, kDeepReading = 1;
// Numbers that fill whole lines of a cache, of any type.
constexpr int64_t kDeepLine = 16;
// Threads up to which all are likely to be equally fast.
constexpr int kDeepFewThreads = 4;
// The most pieces for each thread.
constexpr int64_t kDeepPieces = 8;
// Pixels of a batch up to which threads pack weights that are not kept when they come to them, so that these
// stay in a core's cache: those of a partial sum, for all pixels, or those of a block. With more pixels all
// are packed before any are read.
constexpr int64_t kDeepPartPixels = 1024, kDeepBlockPixels = 400;
// The most numbers of the padded source for each tap where parts are packed: each thread reads all pixels for
// each of its blocks, and with several taps computes longer with what it reads.
constexpr int64_t kDeepPartSource = 1 << 19;
// The most numbers that threads pad each for itself, and the most that are one piece of memory.
constexpr int64_t kDeepOwnNumbers = 4 << 20, kDeepTogetherNumbers = 4 << 20;
// Pixels of the source that are asked for before they are copied: memory is slow to answer, and what it answers
// by itself is too late for images of many short rows.
constexpr int64_t kDeepSourceAhead = 2048;
// What a number costs that is padded, and one of weights, beside a product's pixel with a block.
constexpr double kDeepPadding = 0.8, kDeepFetching = 0.4;
// A block's weights for pairs, from which on they are packed in parts: fewer stay in a core's cache.
constexpr int64_t kDeepPartPairs = 1 << 17;

// The output pixels (row + i * row_step, column + j * column_step), and the taps they sum.
struct Phase {
    int64_t row, column, rows, columns;
    int64_t taps, first_tap;  // in DeepPlan::window: this phase's part
};

struct DeepTap {
    int64_t p, q;          // of the kernel
    int64_t down, across;  // from pixel (i, j) of the phase, the source's (i * step + down, ...)
};

// The taps of a residue of rows modulo the stride, by pairs. Of the residues before it there are so many
// rows of taps in each domain, and so many domains that are kept.
struct Residue {
    Pairs pairs;
    int64_t before[kDomains], kept_before;

    int64_t kept() const { return pairs.is_single() ? 2 : 3 + pairs.kernel % 2; }
    // Of those, the place of domain t.
    int64_t place(int t) const { return kept_before + (pairs.is_single() && t > 0 ? 1 : t); }
};

// A sum over channels and taps for images of one group's channels. By columns, the kernel's row is a column here.
struct Deep : Shape {
    int64_t step_h, step_w;          // of the source from output pixel to output pixel
    int64_t out_step_h, out_step_w;  // of the output from pixel to pixel of a phase
    int64_t top, left, rows, row;    // the padded source: its border and its size; of each residue
                                     // of columns modulo the step, a row has so many
    int64_t window;                  // taps of all phases
    int64_t phases;
    bool by_pairs, by_squares;   // of rows, and of columns as well;
    bool by_columns;             // or of columns only
    Pairs across;                // of columns: how these are taken
    int64_t residues, apart;     // of pairs: of rows modulo the stride, and the rows from y0 to y1,
    int64_t apart_across;        // of squares, the columns
    int64_t pair_rows, starts;   // the pairs of rows of a column, and the rows of a domain of a residue,
    int64_t direction;           // and the step from a tap of the weights to the next one
    Buffer<Phase> phase;
    Buffer<DeepTap> tap;
    Buffer<Residue> residue;

    // The first row of the output of pair n; of the source, divided by the stride, that of a domain's row.
    int64_t first_of(int64_t n) const { return n / apart * 2 * apart + n % apart; }
    bool pairs_rows() const { return by_pairs && !by_columns; }
    bool pairs_columns() const { return by_squares || by_columns; }
};

// A sum for images of such a shape. False without memory.
inline bool begin(const Shape& shape, int64_t phases, int64_t window, Deep* deep) {
    static_cast<Shape&>(*deep) = shape;
    deep->phase = Buffer<Phase>(phases);
    deep->tap = Buffer<DeepTap>(window);
    deep->phases = phases;
    deep->window = 0;
    deep->by_pairs = deep->by_squares = deep->by_columns = false;
    return deep->phase && deep->tap;
}

// The border and size of the padded source, from all taps.
inline void pad_source(Deep* d) {
    int64_t low_h = 0, low_w = 0, high_h = d->height - 1, high_w = d->width - 1;
    for (int64_t n = 0; n < d->phases; ++n) {
        const Phase& phase = d->phase[n];
        for (int64_t t = phase.first_tap; t < phase.first_tap + phase.taps; ++t) {
            const DeepTap& tap = d->tap[t];
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

inline bool deep_forward(const Sweep& s, Deep* d) {
    if (!begin(s, 1, s.kernel_h * s.kernel_w, d)) return false;
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
inline bool deep_backward(const Sweep& s, Deep* d) {
    if (!begin(gradient_shape(s), s.stride_h * s.stride_w, s.kernel_h * s.kernel_w, d))
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
inline Residue fill_residues(const Sweep& s, Deep* d) {
    Residue all = {};
    for (int64_t r = 0; r < d->residues; ++r) {
        all.pairs = pairs_of_residue(s.kernel_h, s.stride_h, r, s.out_height);
        d->residue[r] = all;
        for (int t = 0; t < kDomains; ++t) all.before[t] += all.pairs.groups_in(t);
        all.kept_before += all.kept();
    }
    return all;
}

// Forward or, with `turned` weights and its own sweep, the gradient for x. Phases are domains, whose taps
// are groups of rows and, of squares, groups of columns. The source of squares is the image with a border,
// that of pairs its domains, one under the other, each residue of columns modulo the stride by itself.
inline bool deep_by_pairs(const Sweep& s, bool turned, bool by_squares, Deep* d) {
    const Pairs across = pairs_of(s.kernel_w, s.out_width);
    const bool by_columns = !by_squares && s.kernel_h == 1;
    Sweep taken = s;
    if (by_columns) taken.kernel_h = s.kernel_w, taken.kernel_w = 1;
    if (!begin(taken, by_squares ? kSquareDomains : kDomains, 0, d)) return false;
    d->residues = taken.stride_h < taken.kernel_h ? taken.stride_h : taken.kernel_h;
    d->residue = Buffer<Residue>(d->residues);
    if (!d->residue) return false;
    const Residue all = fill_residues(taken, d);
    const Pairs& pairs = d->residue[0].pairs;
    d->by_pairs = true, d->by_squares = by_squares, d->by_columns = by_columns;
    d->across = across;
    d->apart = s.dilate_h, d->apart_across = by_squares ? s.dilate_w : 1;
    d->pair_rows = by_columns ? s.out_height : d->apart * divide_up(s.out_height, 2 * d->apart);
    d->starts = by_columns ? s.out_height : d->pair_rows + (pairs.groups - 1) * d->apart;
    d->direction = turned ? -1 : 1;
    d->step_h = by_squares ? 2 : 1, d->step_w = by_squares ? 2 : s.stride_w;
    d->out_step_h = d->out_step_w = 1;
    d->top = s.pad_h, d->left = s.pad_w;
    d->rows = by_squares ? 2 * (d->pair_rows + pairs.groups * d->apart) : all.kept_before * d->starts;
    const int64_t row = s.out_width + (s.kernel_w - 1) * s.dilate_w / s.stride_w;
    const int64_t pair_columns = d->apart_across * divide_up(s.out_width, 2 * d->apart_across);
    d->row = by_squares       ? pair_columns + across.groups * d->apart_across
             : by_columns     ? across.starts()
             : s.stride_w > 1 ? round_up(row, kLanes)
                              : row;
    const int64_t columns = d->pairs_columns() ? pair_columns : s.out_width;
    for (int n = 0; n < d->phases; ++n) {
        const int64_t groups = all.before[by_squares ? n / kDomains : n];
        const int64_t taps = groups * (by_squares ? across.groups_in(n % kDomains) : taken.kernel_w);
        d->phase[n] = {0, 0, d->pair_rows, columns, taps, d->window};
        d->window += taps;
    }
    return true;
}

// Numbers that are read soon, of which each product asks for a line, `step` numbers after the last one's. All
// at once would hold up the products.
template <class Sum>
struct DeepAhead {
    const Sum* first;
    int64_t step;
};

// sum + w * *x, where products may be one instruction each.
template <class Sum, class V>
V add_one(V w, const Sum* x, V sum) {
    return sum + w * Lanes<Sum>::broadcast(*x);
}
#if ECE408_LANES == 16
inline Vec add_one(Vec w, const float* x, Vec sum) { return multiply_add_one(w, x, sum); }
#endif

// Sums of `count` products for P pixels that lie side by side, and Q of another row, `apart` behind the first of
// them, in all places that `taps` says, which has kDeepSoon more. Of P pixels that are laid out, LAID, those of a
// product lie `apart` behind the last one's.
template <class Sum, int MV, int P, int Q, bool LAID>
__attribute__((noinline)) void deep_tile(const Sum* pixels, int64_t apart, const int64_t* taps, int64_t count,
                                         const Sum* weight, DeepAhead<Sum> ahead, bool add, Sum* out) {
    using L = Lanes<Sum>;
    typename L::Vec sum[P + Q][MV] = {};
    for (int64_t t = 0; t < count; ++t) {
        // An address of one register each: of two, it would be an instruction of its own in each product.
        const Sum* const at = LAID ? pixels : hidden(pixels + taps[t]);
        const Sum* const second = Q ? hidden(at + apart) : at;
        // With vectors of 16 lanes the first cache is full of the weights that are read, and a product takes
        // long enough to ask for pixels as well.
        __builtin_prefetch(ahead.first, 0, ECE408_LANES == 16 ? 2 : 3);
        ahead.first += ahead.step;
        if (ECE408_LANES == 16) {
            const Sum* const soon = pixels + (LAID ? kDeepSoon * apart : taps[t + kDeepSoon]);
            __builtin_prefetch(soon, 0, 3);
            if (!LAID) __builtin_prefetch(soon + (Q ? apart + Q : P) - 1, 0, 3);
        }
        typename L::Vec w[MV];
#pragma GCC unroll 2
        for (int v = 0; v < MV; ++v) w[v] = L::load(weight + (t * MV + v) * L::count);
#pragma GCC unroll 16
        for (int p = 0; p < P + Q; ++p) {
            const Sum* const from = p < P ? at + p : second + p - P;
            const bool by_one = p >= (P + Q) / 2;
            const typename L::Vec x = by_one ? typename L::Vec{} : L::broadcast(*from);
#pragma GCC unroll 2
            for (int v = 0; v < MV; ++v) sum[p][v] = by_one ? add_one(w[v], from, sum[p][v]) : sum[p][v] + w[v] * x;
        }
        if (LAID) pixels += apart;
    }
#pragma GCC unroll 16
    for (int p = 0; p < P + Q; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < MV; ++v) {
            Sum* place = out + (p * MV + v) * L::count;
            L::store(place, add ? L::load(place) + sum[p][v] : sum[p][v]);
        }
}

template <class Sum>
using DeepTile = void (*)(const Sum*, int64_t, const int64_t*, int64_t, const Sum*, DeepAhead<Sum>, bool, Sum*);

// Where a tile's pixels lie: in one row, as many in each of two, kDeepPixels in two, or laid out.
enum class DeepRows { one, equal, full, laid_out };

constexpr int second_row(DeepRows rows, int first) {
    return rows == DeepRows::equal ? first : rows == DeepRows::full ? kDeepPixels - first : 0;
}

template <class Sum, int MV, DeepRows ROWS, int P>
DeepTile<Sum> pick_deep_row(int64_t first) {
    if constexpr (P > 1) {
        if (first < P) return pick_deep_row<Sum, MV, ROWS, P - 1>(first);
    }
    return deep_tile<Sum, MV, P, second_row(ROWS, P), ROWS == DeepRows::laid_out>;
}

template <class Sum, int MV>
DeepTile<Sum> pick_deep_rows(int64_t first, int64_t second, bool laid_out) {
    if (laid_out) return pick_deep_row<Sum, MV, DeepRows::laid_out, kDeepPixels>(first);
    if (second == 0) return pick_deep_row<Sum, MV, DeepRows::one, kDeepPixels>(first);
    if (second == first) return pick_deep_row<Sum, MV, DeepRows::equal, kDeepPixels / 2>(first);
    return pick_deep_row<Sum, MV, DeepRows::full, kDeepPixels - 1>(first);
}

// For so many vectors of filters, and pixels of one row, or of two; or for those of a row that are laid out.
template <class Sum>
DeepTile<Sum> pick_deep_tile(int64_t vectors, int64_t first, int64_t second, bool laid_out) {
    return vectors == 1 ? pick_deep_rows<Sum, 1>(first, second, laid_out)
                        : pick_deep_rows<Sum, 2>(first, second, laid_out);
}

// Vectors that hold a tile's pixels.
template <class Sum>
constexpr int64_t kDeepRun = (kDeepPixels + Lanes<Sum>::count - 1) / Lanes<Sum>::count;

// Pixels that lie side by side in a row, from the place of the source's first tap on.
struct DeepRun {
    int64_t at, count;
};

// A tile's pixels as [product][pixel], from each product's place in the source. RUNS: of the pixels, or 0
// for any number. Whole vectors are copied, of which the next ones overwrite what is no pixel.
template <int RUNS, class Sum>
void lay_out_pixels(const Sum* source, const int64_t* offsets, int64_t count, const DeepRun* run,
                    int64_t runs, Sum* out) {
    using L = Lanes<Sum>;
    for (int64_t t = 0; t < count; ++t, out += kDeepPixels) {
        const Sum* from = source + offsets[t];
        Sum* to = out;
        for (int64_t r = 0; r < (RUNS ? RUNS : runs); to += run[r++].count)
#pragma GCC unroll 4
            for (int64_t v = 0; v < kDeepRun<Sum>; ++v)
                L::store(to + v * L::count, L::load(from + run[r].at + v * L::count));
    }
}

// Some squares in a row of the source, whose rows lie `row` apart, as vectors of each domain to `to`, of
// which the last ones are left out that have no third tap. The second of their four columns lie `odd` behind the
// first, the other two `next` behind these.
template <class Sum>
__attribute__((always_inline)) inline void store_domains(const Sum* at, int64_t row, int64_t odd, int64_t next,
                                                         int down, int across, int64_t begin,
                                                         Sum* const* to) {
    using L = Lanes<Sum>;
    for (int64_t v = 0; v < kDeepRun<Sum> * L::count; v += L::count) {
        typename L::Vec part[4][kDomains];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const Sum* from = at + i * row + v;
            to_domains(L::load(from), L::load(from + odd), L::load(from + next),
                       L::load(from + odd + next), part[i], 1);
        }
#pragma GCC unroll 4
        for (int t = 0; t < kDomains; ++t) {
            typename L::Vec z[kDomains];
            to_domains(part[0][t], part[1][t], part[2][t], part[3][t], z, 1);
#pragma GCC unroll 4
            for (int d = 0; d < kDomains; ++d)
                if (d < down && t < across) L::store(to[d * kDomains + t] + begin + v, z[d]);
        }
    }
}

// A tile's squares as [product][pixel] of each domain, at `places`, for `count` channels of the source,
// `channel` apart.
template <bool OneTap, class Sum>
void lay_out_squares(const Deep& deep, const Sum* source, int64_t channel, int64_t row, int64_t count,
                     const DeepRun* run, int64_t runs, Sum* const* places) {
    Sum* to[kSquareDomains];  // which no store changes
    for (int n = 0; n < kSquareDomains; ++n) to[n] = places[n];
    const int64_t groups = OneTap ? 1 : deep.residue[0].pairs.groups, taps = OneTap ? 1 : deep.across.groups;
    const int64_t down_step = deep.apart * row, across_step = deep.apart_across;
    for (int64_t c = 0; c < count; ++c, source += channel)
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t k = 0; k < taps; ++k) {
                const int down = kDomains - !(OneTap || deep.residue[0].pairs.has_third(g));
                const int across = kDomains - !(OneTap || deep.across.has_third(k));
                const Sum* at = source + 2 * g * down_step + k * across_step;
                int64_t begin = 0;
                for (int64_t r = 0; r < runs; begin += run[r++].count)
                    store_domains(at + run[r].at, down_step, deep.row, across_step, down, across, begin, to);
#pragma GCC unroll 16
                for (int n = 0; n < kSquareDomains; ++n)
                    to[n] += n / kDomains < down && n % kDomains < across ? kDeepPixels : 0;
            }
}

// Pixels side by side in a row of the output: of the first filter, from element `at` on, of which sums begin with
// pixel `from`.
struct DeepOutput {
    int64_t at, count, from;
};

// The lines of a block's outputs, of which each tile asks for a share while its sums are taken: many stores at
// once would wait for memory.
template <class T>
class DeepAsked {
public:
    // `first`: the first filter's output. `step`: from pixel to pixel.
    DeepAsked(const DeepOutput* output, int64_t outputs, const T* first, int64_t plane, int64_t filters,
              int64_t step, int64_t tiles)
        : output_(output), outputs_(outputs), first_(first), plane_(plane), filters_(filters), step_(step) {
        int64_t lines = 0;
        for (int64_t n = 0; n < outputs; ++n) lines += divide_up(output[n].count * step, kInLine);
        share_ = divide_up(filters * lines, tiles);
    }

    void ask() {
        for (int64_t n = 0; n < share_ && done_ < outputs_; ++n) {
            const DeepOutput& output = output_[done_];
            __builtin_prefetch(first_ + output.at + filter_ * plane_ + next_, 1, 3);
            next_ += kInLine;
            if (next_ < output.count * step_) continue;
            next_ = 0;
            if (++filter_ < filters_) continue;
            filter_ = 0;
            ++done_;
        }
    }

private:
    static constexpr int64_t kInLine = 64 / sizeof(T);

    const DeepOutput* output_;
    int64_t outputs_;
    const T* first_;
    int64_t plane_, filters_, step_, share_, done_ = 0, filter_ = 0, next_ = 0;
};

// Where the weight for filter m (a lane) and channel c of a group lies: first + group * group_step
// + m * filter_step + c * channel_step + p * (the kernel's width) + q.
template <class T>
struct DeepWeights {
    const T* first;
    int64_t group_step, filter_step, channel_step;
};

// What becomes of sums on their way to the output.
template <class T>
struct DeepEnd {
    const T* bias;         // or null
    bool accumulate;       // to what is there
    ece408_finish finish;  // of floats; without factors: nothing
    bool streams = false;  // past the caches, whole lines of them

    // The same from filter `m` and element `at` of the output on.
    DeepEnd from(int64_t m, int64_t at) const {
        return {bias ? bias + m : nullptr, accumulate, finish_from(finish, m, at), streams};
    }
};

// A number, or a vector, between bounds; NaN stays NaN.
template <class V>
V between(V value, V lowest, V highest) {
    value = value < lowest ? lowest : value;
    return value > highest ? highest : value;
}

// Sums of `filters` filters for `count` pixels are finished, but for what is added and bounds after that.
template <class T, class Sum>
void finish_rows(const DeepEnd<T>& end, int64_t filters, int64_t wide, int64_t count, Sum* rows) {
    using L = Lanes<Sum>;
    const ece408_finish& finish = end.finish;
    if (!end.bias && !finish.factors) return;
    Sum factors[kDeepVectors * L::count] = {}, addends[kDeepVectors * L::count] = {};
    for (int64_t m = 0; m < filters; ++m) {
        factors[m] = finish.factors ? finish.factors[m] : 1;
        const Sum bias = end.bias ? static_cast<Sum>(widen(end.bias[m])) : Sum(0);
        addends[m] = finish.factors ? bias * factors[m] + finish.addends[m] : bias;
    }
    const bool is_bounded = finish.factors && !finish.added;
    const auto lowest = L::broadcast(finish.lowest), highest = L::broadcast(finish.highest);
    for (int64_t m = 0; m < wide; m += L::count) {
        const auto factor = L::load(factors + m), addend = L::load(addends + m);
        for (Sum* at = rows + m; at < rows + count * wide; at += wide) {
            const auto value = L::load(at) * factor + addend;
            L::store(at, is_bounded ? between(value, lowest, highest) : value);
        }
    }
}

// The reverse, for `count` pixels: rows[k * wide + m] becomes out[m * step + k * spread], with what is
// added and its bounds, or is added to that.
template <class T, class Sum>
void part_spread(const Sum* rows, int64_t wide, int64_t count, const DeepEnd<T>& end, T* out,
                 int64_t step, int64_t filters, int64_t spread) {
    const ece408_finish& finish = end.finish;
    for (int64_t m = 0; m < filters; ++m) {
        T* to = out + m * step;
        for (int64_t k = 0; k < count; ++k, to += spread) {
            Sum value = rows[k * wide + m];
            if (finish.added)
                value = between<Sum>(value + finish.added[to - out], finish.lowest, finish.highest);
            narrow(end.accumulate ? static_cast<Sum>(widen(*to) + value) : value, to);
        }
    }
}

template <class T, class Sum>
void part(const Sum* rows, int64_t wide, int64_t count, const DeepEnd<T>& end, T* out, int64_t step,
          int64_t filters) {
    part_spread(rows, wide, count, end, out, step, filters, 1);
}

// Of a multiple of four filters. Vectors of pixels are handed on as put(filter, first pixel, pixels, vector).
template <class Put>
__attribute__((always_inline)) inline void part_fours(const float* rows, int64_t wide, int64_t count,
                                                      int64_t filters, const Put& put) {
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t m = 0; m < filters; m += 4) {
        Vec sums[4];
        for (int64_t k = 0; k < whole; k += kLanes) {
            transpose_four(rows + k * wide + m, wide, kLanes, sums);
            for (int64_t i = 0; i < 4; ++i) put(m + i, k, kLanes, sums[i]);
        }
        if (whole == count) continue;
        transpose_four(rows + whole * wide + m, wide, count - whole, sums);
        for (int64_t i = 0; i < 4; ++i) put(m + i, whole, static_cast<int>(count - whole), sums[i]);
    }
}

inline void part(const float* rows, int64_t wide, int64_t count, const DeepEnd<float>& end, float* out,
                 int64_t step, int64_t filters) {
    const int64_t fours = filters / 4 * 4;
    const float* const added = end.finish.added;
    const Vec lowest = broadcast(end.finish.lowest), highest = broadcast(end.finish.highest);
    if (added)
        part_fours(rows, wide, count, fours, [=](int64_t m, int64_t k, int pixels, Vec sum) {
            const int64_t at = m * step + k;
            const float* const from = added + at;
            sum += pixels == kLanes ? load(from) : load_only(lanes_between(0, pixels), from);
            put_lanes(0, pixels, out + at, bounded(sum, lowest, highest), false);
        });
#if ECE408_STREAMS
    else if (end.streams)
        part_fours(rows, wide, count, fours, [=](int64_t m, int64_t k, int pixels, Vec sum) {
            float* const to = out + m * step + k;
            if (pixels == kLanes && floats_past_line(to) == 0) return stream(to, sum);
            put_lanes(0, pixels, to, sum, false);
        });
#endif
    else
        part_fours(rows, wide, count, fours, [=](int64_t m, int64_t k, int pixels, Vec sum) {
            put_lanes(0, pixels, out + m * step + k, sum, end.accumulate);
        });
    const int64_t last = fours * step;  // of the filters that are left
    part_spread(rows + fours, wide, count, end.from(fours, last), out + last, step, filters - fours, 1);
}

// The same to every second element, where nothing is added or bounded.
template <class T, class Sum>
void part_to_even(const Sum* rows, int64_t wide, int64_t count, const DeepEnd<T>& end, T* out, int64_t step,
                  int64_t filters) {
    part_spread(rows, wide, count, end, out, step, filters, 2);
}

#if ECE408_LANES == 16
inline void part_to_even(const float* rows, int64_t wide, int64_t count, const DeepEnd<float>& end,
                         float* out, int64_t step, int64_t filters) {
    constexpr Mask kEven = 0x5555;
    const int64_t fours = filters / 4 * 4;
    const auto put_half = [&](Mask lanes, Vec sum, float* to) {
        store_only(lanes, to, end.accumulate ? sum + load_only(lanes, to) : sum);
    };
    part_fours(rows, wide, count, fours, [&](int64_t m, int64_t k, int pixels, Vec sum) {
        float* const to = out + m * step + 2 * k;
        const int first = pixels < kLanes / 2 ? pixels : kLanes / 2;
        put_half(kEven & lanes_below(2 * first), interleave_first(sum, sum), to);
        if (pixels > first)
            put_half(kEven & lanes_below(2 * (pixels - first)), interleave_second(sum, sum), to + kLanes);
    });
    const int64_t last = fours * step;
    part_spread(rows + fours, wide, count, end, out + last, step, filters - fours, 2);
}
#endif

// How four rows of an image, or columns, become a row of each domain that is kept of a residue: the pixel in column
// k of the padded row goes to `places[domain]` + k % step * row + k / step, where k is in [left, left + width).
struct DomainShape {
    int64_t left, width, step, row;
    bool is_single;
    int64_t places[kDomains];  // or less than 0
};

template <class V>
void to_kept_domains(const DomainShape& s, const V* d, V* z) {
    if (!s.is_single) return to_domains(d[0], d[1], d[2], d[3], z, 1);
    z[0] = d[0], z[3] = d[1];
}

// Domains of rows: the columns from `begin` on, of each residue of columns; rows that there are not are null.
template <class T, class Sum>
void domain_pixels(const DomainShape& s, const T* const* rows, int64_t begin, Sum* out) {
    for (int64_t k = begin * s.step; k < s.row * s.step; ++k) {
        const bool is_there = k >= s.left && k < s.left + s.width;
        Sum d[4], z[kDomains] = {};
        for (int r = 0; r < 4; ++r)
            d[r] = is_there && rows[r] ? static_cast<Sum>(widen(rows[r][k - s.left])) : Sum(0);
        to_kept_domains(s, d, z);
        for (int n = 0; n < kDomains; ++n)
            if (s.places[n] >= 0) out[s.places[n] + k % s.step * s.row + k / s.step] = z[n];
    }
}

// `ends`: whether nothing may be written behind the row.
template <class T, class Sum>
void domain_row(const DomainShape& s, const T* const* rows, bool, Sum* out) {
    domain_pixels(s, rows, 0, out);
}

// Domains of the columns of a row: those from column `begin` of a domain on.
template <class T, class Sum>
void column_pixels(const DomainShape& s, const T* row, int64_t begin, Sum* out) {
    for (int64_t k = begin; k < s.row; ++k) {
        Sum d[4], z[kDomains];
        for (int n = 0; n < 4; ++n) {
            const int64_t column = 2 * k + n - s.left;
            d[n] = column >= 0 && column < s.width ? static_cast<Sum>(widen(row[column])) : Sum(0);
        }
        to_domains(d[0], d[1], d[2], d[3], z, 1);
        for (int n = 0; n < kDomains; ++n)
            if (s.places[n] >= 0) out[s.places[n] + k] = z[n];
    }
}

template <class T, class Sum>
void column_row(const DomainShape& s, const T* row, bool, Sum* out) {
    column_pixels(s, row, 0, out);
}

#if ECE408_LANES > 4
// Vectors that follow each other become those of the lanes of each residue.
inline void part_lanes(Vec (&)[1]) {}
inline void part_lanes(Vec (&v)[2]) {
    const Vec even = even_lanes(v[0], v[1]);
    v[1] = odd_lanes(v[0], v[1]);
    v[0] = even;
}
inline void part_lanes(Vec (&v)[4]) {
    Vec first[2] = {v[0], v[1]}, second[2] = {v[2], v[3]};
    part_lanes(first), part_lanes(second);
    v[0] = even_lanes(first[0], second[0]), v[2] = odd_lanes(first[0], second[0]);
    v[1] = even_lanes(first[1], second[1]), v[3] = odd_lanes(first[1], second[1]);
}

// Of a vector from column `at` of the padded image on, the lanes that are pixels.
inline Mask lanes_inside(const DomainShape& s, int64_t at) {
    const auto lane = [&](int64_t column) {
        return static_cast<int>(column < at ? 0 : column > at + kLanes ? kLanes : column - at);
    };
    return lanes_between(lane(s.left), lane(s.left + s.width));
}

// The first `vectors` columns of each of S residues, in whole vectors.
template <int S>
void domain_vectors(const DomainShape& s, const float* const* rows, int64_t vectors, float* out) {
    for (int64_t k = 0; k < vectors; k += kLanes) {
        Vec kept[kDomains][S];
        for (int v = 0; v < S; ++v) {
            const int64_t at = S * k + v * kLanes;
            const Mask inside = lanes_inside(s, at);
            Vec d[4], z[kDomains] = {};
            for (int r = 0; r < 4; ++r)
                d[r] = rows[r] ? load_only(inside, rows[r] + at - s.left) : broadcast(0.0f);
            to_kept_domains(s, d, z);
            for (int n = 0; n < kDomains; ++n) kept[n][v] = z[n];
        }
        for (int n = 0; n < kDomains; ++n) {
            if (s.places[n] < 0) continue;
            part_lanes(kept[n]);
            for (int v = 0; v < S; ++v) store(out + s.places[n] + v * s.row + k, kept[n][v]);
        }
    }
}

inline void domain_row(const DomainShape& s, const float* const* rows, bool ends, float* out) {
    if (s.step == 3 || s.step > 4) return domain_pixels(s, rows, 0, out);
    const int64_t vectors = (ends ? s.row : round_up(s.row, kLanes)) / kLanes * kLanes;
    (s.step == 1 ? domain_vectors<1> : s.step == 2 ? domain_vectors<2> : domain_vectors<4>)(s, rows, vectors,
                                                                                           out);
    domain_pixels(s, rows, vectors, out);
}

// The pixels of a row from `column` of the padded image on.
inline Vec pixels_from(const DomainShape& s, const float* row, int64_t column) {
    return load_only(lanes_inside(s, column), row + column - s.left);
}

inline void column_row(const DomainShape& s, const float* row, bool ends, float* out) {
    const int64_t vectors = (ends ? s.row : round_up(s.row, kLanes)) / kLanes * kLanes;
    for (int64_t k = 0; k < vectors; k += kLanes) {
        const Vec first = pixels_from(s, row, 2 * k), second = pixels_from(s, row, 2 * k + kLanes);
        const Vec third = pixels_from(s, row, 2 * k + 2), fourth = pixels_from(s, row, 2 * k + 2 + kLanes);
        Vec z[kDomains];
        to_domains(even_lanes(first, second), odd_lanes(first, second), even_lanes(third, fourth),
                   odd_lanes(third, fourth), z, 1);
        for (int n = 0; n < kDomains; ++n)
            if (s.places[n] >= 0) store(out + s.places[n] + k, z[n]);
    }
    column_pixels(s, row, vectors, out);
}
#endif

// Whether the output is written past the caches: only whole lines can be.
template <class T>
bool streams_output(const Deep& deep, const DeepEnd<T>& end) {
    const int64_t outputs = deep.batch * deep.groups * deep.group_filters * deep.out_height * deep.out_width;
    return ECE408_STREAMS && !end.accumulate && !end.finish.added && deep.out_width % kLanes == 0 &&
           exceeds_caches(outputs * static_cast<int64_t>(sizeof(T)));
}

// What is prepared once for a call and shared by its threads.
template <class T, class Sum>
struct DeepPlan {
    const Deep& deep;
    DeepWeights<T> weights;
    Textbook book;     // of the output
    int64_t blocks;    // of filters, in a group
    bool packs_each;   // whether threads pack a block's weights when they come to it,
    bool packs_parts;  // then: those of one partial sum at a time
    bool lays_out;     // whether pixels are laid out as tiles, which may then reach from row to row; others
                       // end with a row
    // Per phase [channel][tap]: from pixel (0, 0)'s place in the padded source.
    Buffer<int64_t> offset;

    DeepPlan(const Deep& deep, const DeepWeights<T>& weights, const Textbook& book)
        : deep(deep),
          weights(weights),
          book(book),
          packs_each(false),
          packs_parts(false),
          lays_out(false) {
        const int64_t most = kDeepVectors * Lanes<Sum>::count;
        blocks = (deep.group_filters + most - 1) / most;
    }

    int64_t units() const { return deep.groups * blocks; }
    int64_t row() const { return deep.step_w * deep.row; }
    int64_t channel() const { return deep.rows * row(); }
    int64_t image() const { return deep.groups * deep.group_channels * channel(); }
    int64_t first(int64_t block) const { return block * kDeepVectors * Lanes<Sum>::count; }
    int64_t filters(int64_t block) const {
        const int64_t left = deep.group_filters - first(block);
        const int64_t most = kDeepVectors * Lanes<Sum>::count;
        return left < most ? left : most;
    }
    int64_t vectors(int64_t block) const {
        return (filters(block) + Lanes<Sum>::count - 1) / Lanes<Sum>::count;
    }
    // Packed weights of a whole block, all phases.
    int64_t packed() const {
        return deep.group_channels * deep.window * kDeepVectors * Lanes<Sum>::count;
    }
    // Whether tiles of any row would be better, for a thread with so many blocks.
    bool should_lay_out(int64_t own_blocks) const {
        const int64_t columns = deep.phase[0].columns;
        const int64_t tiles = (columns + kDeepPixels - 1) / kDeepPixels;
        const bool is_better = deep.step_w > 1 || 3 * columns < 2 * kDeepPixels * tiles;
        return deep.by_squares || (ECE408_LANES < 16 && !deep.by_pairs && !packs_each && is_better &&
                                   own_blocks >= kDeepLaidOutBlocks);
    }
    // What sums are taken over: channels of domains, or products of a phase; as many as one sum has.
    int64_t summed(const Phase& phase) const {
        return deep.group_channels * (deep.by_pairs ? 1 : phase.taps);
    }
    int64_t most_summed() const {
        if (!deep.by_pairs) return kDeepBlock;
        const int64_t taps = deep.phase[0].taps;
        return taps < kDeepBlock ? kDeepBlock / taps : 1;
    }
    int64_t domains() const { return deep.by_pairs ? deep.phases : 1; }
    // Numbers that are laid out for a pixel.
    int64_t pixel_factors() const {
        const int64_t most = most_summed();
        if (!deep.by_squares) return lays_out ? most : 0;
        return deep.window * (deep.group_channels < most ? deep.group_channels : most);
    }
    // The most pixels of a stretch for so many blocks.
    int64_t most_pixels(int64_t blocks) const {
        const int64_t kept = deep.by_pairs && deep.group_channels <= most_summed() ? 1 : blocks;
        const int64_t sums = kDeepSums / (domains() * kept);
        const int64_t factors = lays_out ? kDeepFactors / pixel_factors() : sums;
        const int64_t most = sums < factors ? sums : factors;
        const int64_t longest = packs_parts ? kDeepPartPixels : kDeepStretch;
        return most < kDeepPixels ? kDeepPixels : most < longest ? most : longest;
    }
    // The pixels of a tile that takes two rows of a phase, or 0: all of two short rows, or kDeepPixels of long
    // ones, if tiles that end with their row would have less than four fifths of that.
    int64_t of_two_rows(const Phase& phase) const {
        if (lays_out) return 0;
        if (2 * phase.columns <= kDeepPixels) return 2 * phase.columns;
        const int64_t tiles = (phase.columns + kDeepPixels - 1) / kDeepPixels;
        const bool are_small = 5 * phase.columns < 4 * kDeepPixels * tiles;
        return ECE408_LANES == 16 && phase.columns >= kDeepPixels && are_small ? kDeepPixels : 0;
    }
    // Pixels of a phase that stay together: of a tile, or of a row, with which its tiles end.
    int64_t grain(const Phase& phase) const {
        if (of_two_rows(phase) > 0) return of_two_rows(phase);
        return lays_out || phase.columns > most_pixels(1) ? kDeepPixels : phase.columns;
    }
    // A thread's: factors, sums, and what these of domains become. Vectors are copied to factors, and from
    // images, whose last lanes are no pixels.
    int64_t factors() const {
        const int64_t all = (most_pixels(1) + kDeepPixels) * pixel_factors() + domains() * beyond();
        return (all + kDeepLine - 1) / kDeepLine * kDeepLine;  // sums begin with a line
    }
    int64_t sums() const { return kDeepSums * kDeepVectors * Lanes<Sum>::count; }
    int64_t joined() const { return deep.by_pairs ? sums() / 2 : 0; }
    int64_t part_weights() const {
        return most_summed() * (deep.by_pairs ? deep.window : 1) * kDeepVectors * Lanes<Sum>::count;
    }
    int64_t scratch() const {
        return factors() + sums() + joined() + (packs_parts ? part_weights() : 0);
    }
    int64_t beyond() const { return kDeepRun<Sum> * Lanes<Sum>::count + kMostApart; }

    int64_t offsets() const { return deep.group_channels * deep.window; }
    void fill_offsets() {
        for (int64_t t = 0; t < kDeepSoon; ++t) offset[offsets() + t] = 0;
        for (int64_t n = 0; n < (deep.by_squares ? 0 : deep.phases); ++n) {
            const Phase& phase = deep.phase[n];
            int64_t* next = offset + deep.group_channels * phase.first_tap;
            for (int64_t c = 0; c < deep.group_channels; ++c)
                for (int64_t t = 0; t < phase.taps; ++t)
                    *next++ = c * channel() +
                              (deep.by_pairs ? pairs_offset(n, t) : tap_offset(phase.first_tap + t));
        }
    }
    // From a channel of the source on.
    int64_t tap_offset(int64_t tap) const {
        const int64_t x = deep.left + deep.tap[tap].across, y = deep.top + deep.tap[tap].down;
        return y * row() + x % deep.step_w * deep.row + x / deep.step_w;
    }
    // The same for domain n of rows, whose taps are columns of groups of residues.
    int64_t pairs_offset(int64_t n, int64_t tap) const {
        const int domain = static_cast<int>(n);
        const int64_t x = tap % deep.kernel_w * deep.dilate_w;
        int64_t r = deep.residues - 1;
        while (deep.residue[r].before[n] > tap / deep.kernel_w) --r;
        const Residue& residue = deep.residue[r];
        const int64_t group =
            residue.pairs.first_group(domain) + tap / deep.kernel_w - residue.before[n];
        return residue.place(domain) * deep.starts * row() + group * (deep.by_columns ? 1 : deep.apart * row()) +
               x % deep.step_w * deep.row + x / deep.step_w;
    }

    // Of a block: its first filter's first weight.
    const T* first_weight(int64_t unit) const {
        return weights.first + unit / blocks * weights.group_step +
               first(unit % blocks) * weights.filter_step;
    }

    // A block's weights as [phase][channel][tap][filter], zeros for filters that do not exist.
    void pack(int64_t unit, Sum* out) const {
        if (deep.by_pairs || deep.phases == 1)
            return pack_part(unit, 0, summed(deep.phase[0]), out);
        const int64_t block = unit % blocks, wide = vectors(block) * Lanes<Sum>::count;
        for (int64_t n = 0; n < deep.phases; ++n) {
            const Phase& phase = deep.phase[n];
            const DeepTap* taps = deep.tap + phase.first_tap;
            for (int64_t c = 0; c < deep.group_channels; ++c, out += phase.taps * wide) {
                const T* from = first_weight(unit) + c * weights.channel_step;
                for (int64_t t = 0; t < phase.taps; ++t)
                    interleave(from + taps[t].p * deep.kernel_w + taps[t].q,
                               weights.filter_step, filters(block), wide, 1, out + t * wide);
            }
        }
    }

    // Weights of `count` terms of a sum from `done` on: products of the only phase, as [product][filter], or
    // channels of pairs.
    void pack_part(int64_t unit, int64_t done, int64_t count, Sum* out) const {
        const int64_t block = unit % blocks, wide = vectors(block) * Lanes<Sum>::count;
        const T* const first = first_weight(unit);
        if (deep.by_pairs)
            return pack_pairs(block, first + done * weights.channel_step, count, out);
        const int64_t together = weights.channel_step == deep.window ? offsets() : deep.window;
        for (int64_t t = done, some; t < done + count; t += some, out += some * wide) {
            const int64_t left = together - t % together;
            some = left < done + count - t ? left : done + count - t;
            interleave(first + t / together * weights.channel_step + t % together,
                       weights.filter_step, filters(block), wide, some, out);
        }
    }

    // A block's weights of some channels as [domain][channel][tap][filter], each the sum of up to three taps.
    // A few channels at a time.
    void pack_pairs(int64_t block, const T* first, int64_t channels, Sum* out) const {
        constexpr int64_t kChannels = 4;
        Sum taps[kChannels * kMostPairTaps * kDeepVectors * Lanes<Sum>::count];
        const int64_t wide = vectors(block) * Lanes<Sum>::count;
        const int64_t window = deep.kernel_h * deep.kernel_w;
        const bool together = weights.channel_step == window;
        for (int64_t c = 0; c < channels; c += kChannels) {
            const int64_t left = channels - c, count = left < kChannels ? left : kChannels;
            const T* from = first + c * weights.channel_step;
            for (int64_t i = 0; i < (together ? 1 : count); ++i)
                interleave(from + i * weights.channel_step, weights.filter_step, filters(block),
                           wide, together ? count * window : window, taps + i * window * wide);
            for (int64_t i = 0; i < count; ++i)
                combine_taps(c + i, channels, taps + i * window * wide, wide, out);
        }
    }

    // The weights of one of `channels` channels for all domains, from its taps as [p][q][filter].
    void combine_taps(int64_t c, int64_t channels, const Sum* taps, int64_t wide, Sum* out) const {
        using L = Lanes<Sum>;
        Sum row[kDomains][kMostPairTaps / 2 * kDeepVectors * L::count];
        const int64_t wide_row = deep.kernel_w * wide;
        for (int64_t r = 0; r < deep.residues; ++r) {
            const Residue& residue = deep.residue[r];
            const Pairs& pairs = residue.pairs;
            for (int64_t g = 0; g < pairs.groups; ++g) {
                const int64_t tap = r + 2 * g * deep.stride_h;
                const Sum* first = taps + tap_place(tap, deep.kernel_h) * wide_row;
                for (int64_t m = 0; m < wide_row; m += L::count)
                    expand(pairs, g, first + m, deep.direction * deep.stride_h * wide_row,
                           [&](int t, typename L::Vec v) { L::store(row[t] + m, v); });
                for (int t = 0; t < kDomains; ++t)
                    if (g >= pairs.first_group(t))
                        combine_row(c, channels, residue.before[t] + g - pairs.first_group(t), t,
                                    row[t], wide, out);
            }
        }
    }

    // The weights of row `n` of taps in domain `t` of rows, from its columns as [q][filter].
    void combine_row(int64_t c, int64_t channels, int64_t n, int t, const Sum* columns, int64_t wide,
                     Sum* out) const {
        using L = Lanes<Sum>;
        const int across = deep.by_squares ? kDomains : 1;
        Sum* to[kDomains];
        for (int u = 0; u < across; ++u) {
            const Phase& phase = deep.phase[t * across + u];
            const int64_t first = deep.by_squares ? deep.across.first_group(u) : 0;
            const int64_t taps = deep.by_squares ? deep.across.groups - first : deep.kernel_w;
            const int64_t before = c * phase.taps + n * taps - first;
            to[u] = out + (channels * phase.first_tap + before) * wide;
        }
        if (!deep.by_squares) {
            for (int64_t k = 0; k < deep.kernel_w; ++k)
                memcpy(to[0] + k * wide, columns + tap_place(k, deep.kernel_w) * wide,
                       static_cast<size_t>(wide) * sizeof(Sum));
            return;
        }
        for (int64_t k = 0; k < deep.across.groups; ++k) {
            const Sum* from = columns + tap_place(2 * k, deep.across.kernel) * wide;
            for (int64_t m = 0; m < wide; m += L::count)
                expand(deep.across, k, from + m, deep.direction * wide,
                       [&](int u, typename L::Vec v) {
                           if (k >= deep.across.first_group(u)) L::store(to[u] + k * wide + m, v);
                       });
        }
    }

    // A tap's place, with the kernel turned round or not.
    int64_t tap_place(int64_t tap, int64_t kernel) const {
        return deep.direction < 0 ? kernel - 1 - tap : tap;
    }

    // Hands on a vector of weights in each domain, from those of a group's taps, that lie `step` apart.
    template <class Store>
    __attribute__((always_inline)) static void expand(const Pairs& pairs, int64_t group, const Sum* g,
                                                      int64_t step, const Store& store) {
        using L = Lanes<Sum>;
        const typename L::Vec first = L::load(g);
        if (pairs.is_single()) return store(0, first), store(3, first);
        const typename L::Vec second = L::load(g + step);
        const auto third = pairs.has_third(group) ? L::load(g + 2 * step) : typename L::Vec{};
#pragma GCC unroll 4
        for (int t = 0; t < kDomains; ++t) store(t, domain_weight(t, first, second, third));
    }

    // For some rows of a channel, from row `first` on, what is as many pixels further on as is copied later.
    void ask_for(const T* source, int64_t first, int64_t rows) const {
        const T* const ahead = source + first * deep.width + kDeepSourceAhead;
        constexpr int64_t kInLine = kLine * sizeof(float) / sizeof(T);
        for (int64_t k = 0; k < rows * deep.width; k += kInLine) __builtin_prefetch(ahead + k, 0, 2);
    }

    // A channel's domains, one under the other; of these the rows [begin, end).
    void transform(const T* source, int64_t begin, int64_t end, Sum* out) const {
        for (int64_t r = 0; r < deep.residues; ++r) {
            const Residue& residue = deep.residue[r];
            DomainShape shape = {deep.left, deep.width, deep.step_w, deep.row, residue.pairs.is_single(), {}};
            for (int t = 0; t < kDomains; ++t)
                shape.places[t] = residue.pairs.groups_in(t) ? residue.place(t) * deep.starts * row() : -1;
            for (int64_t start = begin; start < end; ++start) {
                // Vectors write behind a row, where the next domain may be.
                const bool ends = (deep.starts - start) * row() < round_up(row(), kLanes);
                if (deep.by_columns) {
                    ask_for(source, start, 1);
                    column_row(shape, source + start * deep.width, ends, out + start * row());
                    continue;
                }
                if (r == 0) ask_for(source, deep.first_of(start) * deep.stride_h - deep.top, 2 * deep.stride_h);
                const T* d[4];
                for (int64_t n = 0; n < 4; ++n) {
                    const int64_t y = (deep.first_of(start) + n * deep.apart) * deep.stride_h + r - deep.top;
                    d[n] = y >= 0 && y < deep.height ? source + y * deep.width : nullptr;
                }
                domain_row(shape, d, ends, out + start * row());
            }
        }
    }

    // Rows of the padded source, or of each domain of pairs.
    struct Rows {
        int64_t begin, end;
    };
    Rows all_rows() const {
        return {0, deep.by_pairs && !deep.by_squares ? deep.starts : deep.rows};
    }
    // Those that the pixels [begin, end) of an image's only phase are computed from.
    Rows rows_of(int64_t begin, int64_t end) const {
        const int64_t columns = deep.phase[0].columns, last = (end - 1) / columns;
        if (deep.by_squares) {
            const int64_t groups = deep.residue[0].pairs.groups;
            return {deep.first_of(begin / columns), deep.first_of(last) + (2 * groups + 1) * deep.apart + 1};
        }
        if (deep.by_pairs) return {begin / columns, last + deep.starts - deep.pair_rows + 1};
        const DeepTap& lowest = deep.tap[deep.window - 1];  // taps are in the order of rows
        return {begin / columns * deep.step_h, last * deep.step_h + deep.top + lowest.down + 1};
    }

    // A channel with its border, some rows of it; of each row, one residue of columns after the other.
    void pad(const T* source, const Rows& rows, Sum* out) const {
        if (deep.by_pairs && !deep.by_squares) return transform(source, rows.begin, rows.end, out);
        const RowShape first = row_shape(0), second = row_shape(deep.step_w > 1 ? 1 : 0);
        const RowCopy<T, Sum> copy_first{first}, copy_second{second};
        const Sum* const end = out + channel();
        const int64_t vectors = (deep.step_w - 1) * deep.row + round_up(deep.row, kLanes);
        const bool is_spread = deep.by_squares && deep.apart_across > 1;
        out += rows.begin * row();
        for (int64_t y = rows.begin; y < rows.end; ++y, out += row()) {
            const int64_t from = y - deep.top;
            ask_for(source, from, 1);
            const T* const own = source + from * deep.width - deep.left;
            if (from < 0 || from >= deep.height) {
                memset(out, 0, static_cast<size_t>(row()) * sizeof(Sum));
            } else if (is_spread) {
                pad_spread(source + from * deep.width, out);
            } else if (deep.step_w <= 2 && end - out >= vectors) {
                copy_first(own, out);
                if (deep.step_w == 2) copy_second(own + 1, out + deep.row);
            } else {  // vectors would write to the next channel, another thread's
                for (int64_t n = 0; n < deep.step_w; ++n)
                    copy_pixels(row_shape(n), own + n, out + n * deep.row);
            }
        }
    }

    // A row for squares whose columns lie apart: the first columns of all, then the second ones.
    void pad_spread(const T* source, Sum* out) const {
        const int64_t apart = deep.apart_across;
        for (int64_t second = 0; second < 2; ++second)
            for (int64_t k = 0; k < deep.row; k += apart, out += apart) {
                const int64_t column = 2 * k + second * apart - deep.left;
                if (column >= 0 && column + apart <= deep.width)
                    for (int64_t n = 0; n < apart; ++n) out[n] = static_cast<Sum>(widen(source[column + n]));
                else
                    for (int64_t n = 0; n < apart; ++n) {
                        const bool is_there = column + n >= 0 && column + n < deep.width;
                        out[n] = is_there ? static_cast<Sum>(widen(source[column + n])) : Sum(0);
                    }
            }
    }

    // The pixels of a row whose columns are the residue `n`, from column n - left on.
    RowShape row_shape(int64_t n) const {
        const auto before = [&](int64_t column) {  // steps that begin before it
            return column <= n ? 0 : (column - n + deep.step_w - 1) / deep.step_w;
        };
        return {deep.step_w, before(deep.left), before(deep.left + deep.width), deep.row};
    }

    // Some pixels of a phase, numbered through the rows of some images, cut into tiles, and what of their
    // sums' terms is being added.
    struct Stretch {
        const Phase& phase;
        int64_t begin, end, tiles, done, count, outputs;
        int64_t first[kDeepPartPixels + 1];  // pixel of each tile, from `begin` on,
        int64_t at[kDeepPartPixels];         // and its place in the images, if none are laid out,
        int64_t in_first[kDeepPartPixels];   // its pixels in its first row,
        int64_t apart[kDeepPartPixels];      // and how far its second row lies from that
        DeepOutput output[2 * kDeepPartPixels];

        Stretch(const Phase& phase, int64_t begin, int64_t end)
            : phase(phase), begin(begin), end(end), tiles(0), done(0), count(0), outputs(0) {}

        int64_t pixels() const { return end - begin; }
        int64_t pixels(int64_t tile) const { return first[tile + 1] - first[tile]; }
    };

    // A pixel's place in the padded images, and how many of its row follow up to pixel `end`.
    DeepRun run_of(const Phase& phase, int64_t n, int64_t end) const {
        const int64_t i = n / phase.columns, j = n % phase.columns, left = phase.columns - j;
        const int64_t y = deep.by_squares ? deep.first_of(i % phase.rows) : i % phase.rows * deep.step_h;
        return {i / phase.rows * image() + y * row() + j,
                left < end - n ? left : end - n};
    }

    // Pixels from `n` on, of which `run` has the first row, or all.
    void add_tile(Stretch* s, int64_t n, int64_t count, const DeepRun& run) const {
        const bool has_two = run.count < count;
        s->first[s->tiles] = n - s->begin;
        s->at[s->tiles] = run.at;
        s->in_first[s->tiles] = has_two ? run.count : count;
        s->apart[s->tiles] = has_two ? run_of(s->phase, n + run.count, s->end).at - run.at : 0;
        ++s->tiles;
    }

    void cut(Stretch* s) const {
        const int64_t both = of_two_rows(s->phase);
        s->tiles = 0;
        for (int64_t n = s->begin, count; n < s->end; n += count) {
            const DeepRun run = run_of(s->phase, n, s->end);
            if (both > 0 && n + both <= s->end) {
                count = both;
                add_tile(s, n, count, run);
                continue;
            }
            count = lays_out ? s->pixels() : run.count;
            const int64_t tiles = (count + kDeepPixels - 1) / kDeepPixels;
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int64_t from = count * tile / tiles, after = count * (tile + 1) / tiles;
                add_tile(s, n + from, after - from, {run.at + from, after - from});
            }
        }
        s->first[s->tiles] = s->pixels();
    }

    // Domain n's phase, and its taps for each of the terms of a sum.
    const Phase& phase_of(const Stretch& s, int64_t n) const {
        return deep.by_pairs ? deep.phase[n] : s.phase;
    }
    int64_t each(int64_t n) const { return deep.by_pairs ? deep.phase[n].taps : 1; }
    // Where its factors of a tile begin.
    int64_t place(const Stretch& s, int64_t n, int64_t tile) const {
        if (!deep.by_squares) return tile * s.count * kDeepPixels;
        const Phase& phase = deep.phase[n];
        return (phase.first_tap * s.tiles + tile * phase.taps) * s.count * kDeepPixels +
               n * beyond();
    }

    void lay_out(const Sum* images, const Stretch& s, Sum* factors) const {
        for (int64_t tile = 0; tile < s.tiles; ++tile) {
            DeepRun run[kDeepPixels];
            int64_t runs = 0;
            const int64_t end = s.begin + s.first[tile + 1];
            for (int64_t n = s.begin + s.first[tile]; n < end; n += run[runs++].count)
                run[runs] = run_of(s.phase, n, end);
            if (!deep.by_squares) {
                (runs == 1   ? lay_out_pixels<1, Sum>
                 : runs == 2 ? lay_out_pixels<2, Sum>
                             : lay_out_pixels<0, Sum>)(
                    images, offset + deep.group_channels * s.phase.first_tap + s.done, s.count, run,
                    runs, factors + place(s, 0, tile));
                continue;
            }
            Sum* to[kSquareDomains];
            for (int64_t n = 0; n < kSquareDomains; ++n) to[n] = factors + place(s, n, tile);
            (deep.phase[0].taps == 1 ? lay_out_squares<true, Sum> : lay_out_squares<false, Sum>)(
                deep, images + s.done * channel(), channel(), row(), s.count, run, runs, to);
        }
    }

    int64_t block_sums(int64_t pixels) const { return pixels * kDeepVectors * Lanes<Sum>::count; }

    // Adds products to a block's sums, as [domain][pixel][filter]. `weights(n)`: domain n's. `next`: what
    // is read after them, or null. Of this, and of the next domain's, each tile asks for a share.
    template <class Weights>
    void add_products(const Sum* images, const Stretch& s, int64_t block, const Weights& weights,
                      const Sum* next, const Sum* factors, DeepAsked<T> asked, Sum* sums) const {
        const int64_t vectors = this->vectors(block), wide = vectors * Lanes<Sum>::count;
        for (int64_t n = 0; n < domains(); ++n, sums += block_sums(s.pixels())) {
            const int64_t count = s.count * each(n), all = count * wide;
            const int64_t first = deep.group_channels * phase_of(s, n).first_tap + s.done * each(n);
            const int64_t* const taps = offset + first;
            const Sum* const own = weights(n);
            const Sum* const then = next && n + 1 < domains() ? weights(n + 1) : next;
            const int64_t step = (wide + s.tiles - 1) / s.tiles;
            for (int64_t tile = 0; tile < s.tiles; ++tile) {
                const Sum* const pixels =
                    lays_out ? factors + place(s, n, tile) : images + s.at[tile];
                const int64_t in_first = s.in_first[tile];
                asked.ask();
                pick_deep_tile<Sum>(vectors, in_first, s.pixels(tile) - in_first, lays_out)(
                    pixels, lays_out ? kDeepPixels : s.apart[tile], taps, count, own,
                    then ? DeepAhead<Sum>{then + all * tile / s.tiles, step} : DeepAhead<Sum>{own, 0},
                    s.done > 0, sums + s.first[tile] * wide);
            }
        }
    }

    // Domains' sums of `count` pairs or squares become rows of pixels: all even ones, then the odd ones; those of
    // pairs of columns one row.
    template <bool Squares>
    void join(const Sum* sums, int64_t step, int64_t count, int64_t wide, Sum* rows) const {
        using L = Lanes<Sum>;
        constexpr int kAcross = Squares ? kDomains : 1, kColumns = Squares ? 2 : 1;
        const int64_t each = (deep.pairs_columns() ? 2 : 1) * wide, second = deep.by_columns ? wide : count * each;
        // Of pairs of columns, the first outputs of `group` pairs lie side by side, then their second ones.
        const int64_t group = deep.pairs_columns() ? deep.apart_across : count, next = group * wide;
        for (int64_t k = 0; k < count; k += group, rows += each * group - next)
            for (const Sum* const end = sums + next; sums < end; rows += wide)
                for (int64_t v = 0; v < wide; v += L::count, sums += L::count) {
                    typename L::Vec half[2][kAcross];
#pragma GCC unroll 4
                    for (int t = 0; t < kAcross; ++t) {
                        typename L::Vec z[kDomains];
#pragma GCC unroll 4
                        for (int d = 0; d < kDomains; ++d) z[d] = L::load(sums + (d * kAcross + t) * step);
                        to_rows(z, 1);
                        half[0][t] = z[0], half[1][t] = z[1];
                    }
#pragma GCC unroll 2
                    for (int odd = 0; odd < 2; ++odd) {
                        if constexpr (Squares) to_rows(half[odd], 1);
#pragma GCC unroll 2
                        for (int b = 0; b < kColumns; ++b)
                            L::store(rows + odd * second + b * next + v, half[odd][b]);
                    }
                }
    }

    // Where a stretch's outputs lie. Rows that follow each other are one.
    void find_outputs(Stretch* s) const {
        const Phase& phase = s->phase;
        const int64_t across = deep.pairs_columns() ? 2 : 1, down = deep.pairs_rows() ? 2 : 1;
        const bool whole = !deep.by_pairs && deep.phases == 1;
        const int64_t columns = whole ? phase.rows * phase.columns : phase.columns;
        const int64_t height = whole ? 1 : phase.rows;
        const int64_t image = deep.groups * deep.group_filters * deep.out_height * deep.out_width;
        for (int64_t n = s->begin, count; n < s->end; n += count) {
            const int64_t i = n / columns, j = n % columns * across;
            count = columns - n % columns < s->end - n ? columns - n % columns : s->end - n;
            for (int64_t odd = 0; odd < down; ++odd) {
                const int64_t row = deep.pairs_rows() ? deep.first_of(i % height) + odd * deep.apart
                                                  : phase.row + i % height * deep.out_step_h;
                if (row >= deep.out_height) continue;
                // Of the last pairs of a row some may have one pixel, or none.
                const int64_t pixels = count * across, left = deep.out_width - j;
                s->output[s->outputs++] = {
                    i / height * image + row * deep.out_width + phase.column + j * deep.out_step_w,
                    whole || pixels < left ? pixels : left, (odd * s->pixels() + n - s->begin) * across};
            }
        }
    }

    // The first output of a block's first filter, of the first image.
    int64_t block_output(int64_t group, int64_t block) const {
        return (group * deep.group_filters + first(block)) * deep.out_height * deep.out_width;
    }

    // Those of a block, if they are the next that are written.
    DeepAsked<T> asked_outputs(const Stretch& s, int64_t group, int64_t block, bool is_asked, const T* y) const {
        return {s.output, is_asked ? s.outputs : 0, y + block_output(group, block),
                deep.out_height * deep.out_width, filters(block), deep.out_step_w, domains() * s.tiles};
    }

    // Sums of pixels of a row become a block's outputs.
    void write_output(int64_t group, int64_t block, const DeepOutput& output, bool finite,
                      const DeepEnd<T>& end, Sum* sums, T* y) const {
        const int64_t wide = vectors(block) * Lanes<Sum>::count;
        const int64_t plane = deep.out_height * deep.out_width, count = output.count;
        const int64_t at = block_output(group, block) + output.at;
        T* const to = y + at;
        const DeepEnd<T> own = end.from(group * deep.group_filters + first(block), at);
        for (int64_t m = 0; m < (finite ? 0 : filters(block)); ++m)
            settle(book, sums + m, wide, count, to + m * plane, deep.out_step_w);
        finish_rows(own, filters(block), wide, count, sums);
        if (deep.out_step_w == 1)
            part(sums, wide, count, own, to, plane, filters(block));
        else if (deep.out_step_w == 2)
            part_to_even(sums, wide, count, own, to, plane, filters(block));
        else
            part_spread(sums, wide, count, own, to, plane, filters(block), deep.out_step_w);
    }

    // A block's sums of a stretch become outputs. `rows`: room for what domains' sums become.
    void write_block(const Stretch& s, int64_t group, int64_t block, const DeepEnd<T>& end, Sum* sums,
                     Sum* rows, T* y) const {
        const int64_t wide = vectors(block) * Lanes<Sum>::count, pixels = s.pixels();
        if (deep.by_squares)
            join<true>(sums, block_sums(pixels), pixels, wide, rows);
        else if (deep.by_pairs)
            join<false>(sums, block_sums(pixels), pixels, wide, rows);
        else
            rows = sums;
        const int64_t all = (deep.by_squares ? 4 : deep.by_pairs ? 2 : 1) * pixels;
        const bool finite = all_finite(rows, all * wide);
        for (int64_t n = 0; n < s.outputs; ++n)
            write_output(group, block, s.output[n], finite, end, rows + s.output[n].from * wide, y);
    }

    // A stretch of pixels for some blocks of filters, one if parts of weights are packed. Phase 0 stands for
    // the domains of pairs.
    void run_stretch(const Sum* images, int64_t group, int64_t first_block, int64_t end_block,
                     const Phase& phase, int64_t begin, int64_t end, const Sum* packed,
                     const DeepEnd<T>& last, Sum* scratch, T* y) const {
        Sum* const sums = scratch + factors();
        Sum* const part = sums + this->sums() + joined();
        Stretch s(phase, begin, end);
        cut(&s);
        find_outputs(&s);
        const int64_t all = summed(phase), most = most_summed();
        images += group * deep.group_channels * channel();
        do {
            s.count = all - s.done < most ? all - s.done : most;
            if (lays_out) lay_out(images, s, scratch);
            if (packs_parts) pack_part(group * blocks + first_block, s.done, s.count, part);
            for (int64_t block = first_block; block < end_block; ++block) {
                const auto weights_of = [&](int64_t block, int64_t n, int64_t done) -> const Sum* {
                    const int64_t first_tap = phase_of(s, n).first_tap;
                    const int64_t wide = vectors(block) * Lanes<Sum>::count;
                    if (packs_parts) return part + s.count * first_tap * wide;
                    return packed + (block - first_block) * this->packed() +
                           (deep.group_channels * first_tap + done * each(n)) * wide;
                };
                const bool ends = s.done + s.count == all, whole = all <= most;
                Sum* const own =
                    sums + (whole ? 0 : block - first_block) * domains() * block_sums(s.pixels());
                // After the last block's weights there may be the next one's, or nothing: who asks for
                // memory that there is not gets none.
                const Sum* const next =
                    packs_parts             ? nullptr
                    : block + 1 < end_block ? weights_of(block + 1, 0, s.done)
                    : ends                  ? packed + (end_block - first_block) * this->packed()
                                            : weights_of(first_block, 0, s.done + s.count);
                add_products(
                    images, s, block, [&](int64_t n) { return weights_of(block, n, s.done); }, next,
                    scratch, asked_outputs(s, group, block, ends && !last.streams, y), own);
                if (ends)
                    write_block(s, group, block, last, own, sums + this->sums(), y);
            }
            s.done += s.count;
        } while (s.done < all);
    }

    // Slice `slice` of `slices` of the pixels of `count` images, for some blocks of a group.
    void run_blocks(const Sum* images, int64_t count, int64_t group, int64_t first_block,
                    int64_t end_block, int64_t slice, int64_t slices, const Sum* packed,
                    const DeepEnd<T>& last, Sum* scratch, T* y) const {
        const bool share_pixels = lays_out || (ECE408_LANES < 16 && !deep.by_pairs);
        const int64_t most_blocks = share_pixels ? kDeepTogether : 1;
        const int64_t parts = (end_block - first_block + most_blocks - 1) / most_blocks;
        const int64_t blocks = (end_block - first_block + parts - 1) / parts;
        for (int64_t n = 0; n < (deep.by_pairs ? 1 : deep.phases); ++n) {
            const Phase& phase = deep.phase[n];
            const int64_t pixels = count * phase.rows * phase.columns, grain = this->grain(phase);
            if (pixels == 0) continue;
            const int64_t grains = (pixels + grain - 1) / grain, most = most_pixels(blocks) / grain;
            const int64_t begin = grains * slice / slices, all = grains * (slice + 1) / slices - begin;
            const int64_t stretches = (all + most - 1) / most;
            // A stretch's blocks one after the other if these read its pixels in turns, else a block's
            // stretches.
            for (int64_t at = 0; at < stretches * parts; ++at) {
                const int64_t k = share_pixels ? at / parts : at % stretches;
                const int64_t part = share_pixels ? at % parts : at / stretches;
                const int64_t from = (end_block - first_block) * part / parts;
                const int64_t to = (end_block - first_block) * (part + 1) / parts;
                const int64_t end = (begin + all * (k + 1) / stretches) * grain;
                run_stretch(images, group, first_block + from, first_block + to, phase,
                            (begin + all * k / stretches) * grain, end < pixels ? end : pixels,
                            packed + from * this->packed(), last, scratch, y);
            }
        }
    }
};

// Whether threads share so many pieces evenly, or almost.
inline bool are_shared_evenly(int64_t pieces, int threads) {
    return pieces % threads == 0 || pieces >= kDeepPieces * threads;
}

// The next larger number of parts of which the largest one is smaller; more than `all` if there is none.
inline int64_t finer(int64_t all, int64_t parts) {
    const int64_t largest = (all + parts - 1) / parts;
    return largest > 1 ? (all + largest - 2) / (largest - 1) : all + 1;
}

// How the work of a call is cut into pieces.
struct DeepShares {
    bool by_image;     // a thread pads an image and computes all of it
    int64_t together;  // images that are padded before any is computed
    int64_t slices;    // of their pixels,
    int64_t parts;     // and of a group's blocks of filters

    // `image` and `packed`: numbers of a padded image, and of a block's weights. What is larger
    // stays in a thread's own cache. `pixels`: of an image's phase, of which `grain` stay together. `each`:
    // pieces are blocks. `whole`: pieces have all blocks, whose weights are read for each.
    DeepShares(const Shape& s, int64_t blocks, int64_t image, int64_t packed, int64_t pixels,
               int64_t grain, bool lays_out, bool each, bool whole, int threads) {
        by_image = !each && (threads == 1 || (s.batch >= 2 * threads && image >= packed));
        together = by_image ? 1 : images_together(s.batch, image);
        slices = parts = 1;
        if (each) parts = blocks;
        if (by_image || each) return;
        if (pixels == 0) return;
        const int64_t grains = (together * pixels + grain - 1) / grain;
        const int64_t most = (whole ? kDeepPieces / 4 : kDeepPieces) * threads;
        const int64_t tiles = (grain + kDeepPixels - 1) / kDeepPixels;
        double least = 0;
        for (int64_t p = 1; p <= (whole ? 1 : blocks) && p <= most; p = finer(blocks, p))
            for (int64_t n = 1; n <= grains && n * p <= most; n = finer(grains, n)) {
                const double time = this->time(s.groups * n * p, (grains + n - 1) / n * tiles,
                                               (blocks + p - 1) / p, lays_out, threads);
                if (least > 0 && time >= least) continue;
                least = time, slices = n, parts = p;
            }
    }

private:
    // Of so many pieces; some of one is lost where threads are not equally fast, as one of many often is.
    static double time(int64_t pieces, int64_t tiles, int64_t blocks, bool lays_out, int threads) {
        const double lost = threads > kDeepFewThreads ? 1 : 0.25;
        const double rounds = static_cast<double>((pieces + threads - 1) / threads) + lost;
        const double all = static_cast<double>(blocks);
        const double laid_out = lays_out ? kDeepLayingOut : 0;
        return rounds * (static_cast<double>(tiles) * (all + laid_out) + kDeepReading * all);
    }
};

// Two threads that each pad for themselves the rows of one image that they compute from, if these take longer
// than all weights, which both read then: what another core has written is slow to read. More threads would
// have too few rows each.
template <class T, class Sum>
class DeepOwnRows {
public:
    using Rows = typename DeepPlan<T, Sum>::Rows;

    DeepOwnRows(const DeepPlan<T, Sum>& plan, bool has_weights, int threads) : plan_(plan) {
        const Deep& deep = plan.deep;
        const double padded = kDeepPadding * static_cast<double>(plan.image());
        const double fetched = kDeepFetching * static_cast<double>(plan.units() * plan.packed());
        pay_ = has_weights && deep.batch == 1 && deep.groups == 1 && threads == kThreads &&
               padded > fetched && grains() >= kThreads && kThreads * plan.image() <= kDeepOwnNumbers;
    }

    bool pay() const { return pay_; }

    // Has a member's image hold what slice `slice` of `slices` is computed from. At first a member gets all
    // that it is likely to need.
    void pad(int64_t slice, int64_t slices, int member, const T* source, Sum* image) {
        Rows& done = done_[member];
        const Rows needed = rows(slice, slice + 1, slices);
        if (done.begin <= needed.begin && needed.end <= done.end) return;
        const int64_t after = slice + (slices + kThreads - 1) / kThreads;
        done = done.end > 0 ? needed : rows(slice, after < slices ? after : slices, slices);
        const Deep& deep = plan_.deep;
        for (int64_t c = 0; c < deep.group_channels; ++c)
            plan_.pad(source + c * deep.height * deep.width, done, image + c * plan_.channel());
    }

private:
    static constexpr int kThreads = 2;

    int64_t pixels() const { return plan_.deep.phase[0].rows * plan_.deep.phase[0].columns; }
    int64_t grain() const { return plan_.grain(plan_.deep.phase[0]); }
    int64_t grains() const { return (pixels() + grain() - 1) / grain(); }

    // Of some slices.
    Rows rows(int64_t first, int64_t after, int64_t slices) const {
        const int64_t end = grains() * after / slices * grain();
        return plan_.rows_of(grains() * first / slices * grain(), end < pixels() ? end : pixels());
    }

    const DeepPlan<T, Sum>& plan_;
    bool pay_;
    Rows done_[kThreads] = {};
};

// The weights of all units, where `packed` has room for them.
template <class T, class Sum>
void pack_deep(const DeepPlan<T, Sum>& plan, Sum* packed, int threads) {
    share(threads, plan.units(),
          [&](int64_t unit, int) { plan.pack(unit, packed + unit * plan.packed()); });
}

// `kept`: the weights of all units, packed, or null. Returns false if there is no memory, and then has
// written nothing.
template <class T, class Sum>
bool run_deep(DeepPlan<T, Sum>* made, const Sum* kept, const T* source, DeepEnd<T> end, T* out,
              int threads) {
    DeepPlan<T, Sum>& plan = *made;
    const Deep& deep = plan.deep;
    end.streams = streams_output(deep, end);
    const int64_t channels = deep.groups * deep.group_channels, pixels = deep.height * deep.width;
    const int64_t out_image =
        deep.groups * deep.group_filters * deep.out_height * deep.out_width;
    const int64_t units = plan.units(), blocks = plan.blocks;
    const int64_t out_pixels = deep.batch * deep.out_height * deep.out_width;
    plan.packs_each = !kept && !deep.by_squares && threads > 1 && are_shared_evenly(units, threads) &&
                      images_together(deep.batch, plan.image()) == deep.batch;
    const bool stays = deep.batch * plan.image() <= kDeepPartSource * deep.window || units <= threads;
    const bool has_parts = deep.by_pairs ? plan.packed() >= kDeepPartPairs : deep.phases == 1;
    plan.packs_parts = plan.packs_each && has_parts && stays && out_pixels <= kDeepPartPixels;
    plan.packs_each = plan.packs_parts || (plan.packs_each && out_pixels < kDeepBlockPixels);
    // Each of many images is computed by one thread, of few ones some blocks.
    plan.lays_out = plan.should_lay_out(deep.batch >= threads ? blocks : blocks * deep.batch / threads);
    DeepOwnRows<T, Sum> own_rows(plan, kept != nullptr, threads);
    const DeepShares shares(deep, blocks, plan.image(), plan.packed(),
                            deep.phase[0].rows * deep.phase[0].columns, plan.grain(deep.phase[0]),
                            plan.lays_out, plan.packs_each, own_rows.pay(), threads);
    const int64_t images = shares.by_image || own_rows.pay() ? threads : shares.together;
    const int64_t packings = kept || plan.packs_parts ? 0 : plan.packs_each ? threads : units;
    const int64_t own_scratch = plan.scratch();
    // Pages of new memory have to be made. Memory is new in each call if it is larger than 32 MiB, so large
    // parts are apart; or if together with other memory it is twice the largest that was given back, so
    // small parts are one.
    const int64_t all_scratch = threads * own_scratch;
    const int64_t all_images = images * plan.image() + plan.beyond();
    const bool is_one = all_scratch + all_images <= kDeepTogetherNumbers;
    const Buffer<Sum> own(packings * plan.packed()), memory(all_scratch + (is_one ? all_images : 0));
    const Buffer<Sum> apart(is_one ? 0 : all_images);
    plan.offset = Buffer<int64_t>(plan.offsets() + kDeepSoon);
    if (!own || !memory || !apart || !plan.offset) return false;
    Sum* const scratch = memory;
    Sum* const padded = is_one ? memory + all_scratch : apart;
    plan.fill_offsets();
    const Sum* const packed = kept ? kept : own;
    const auto pad = [&](int64_t b, int64_t c, Sum* image) {
        plan.pad(source + (b * channels + c) * pixels, plan.all_rows(), image + c * plan.channel());
    };
    const auto compute = [&](int64_t first, int64_t count, const Sum* image, int64_t group,
                             int64_t part, int64_t slice, int member) {
        const int64_t begin = blocks * part / shares.parts, after = blocks * (part + 1) / shares.parts;
        const int64_t unit = plan.packs_parts ? 0 : plan.packs_each ? member : group * blocks + begin;
        if (plan.packs_each && !plan.packs_parts)
            plan.pack(group * blocks + begin, own + unit * plan.packed());
        plan.run_blocks(image, count, group, begin, after, slice, shares.slices,
                        packed + unit * plan.packed(), end.from(0, first * out_image),
                        scratch + member * own_scratch, out + first * out_image);
#if ECE408_STREAMS
        if (end.streams) finish_streams();
#endif
    };
    if (own_rows.pay()) {
        share(threads, shares.slices, [&](int64_t slice, int member) {
            Sum* const image = padded + member * plan.image();
            own_rows.pad(slice, shares.slices, member, source, image);
            compute(0, 1, image, 0, 0, slice, member);
        });
        return true;
    }
    if (shares.by_image) {
        if (!kept) pack_deep<T, Sum>(plan, own, threads);
        share(threads, deep.batch, [&](int64_t b, int member) {
            Sum* image = padded + member * plan.image();
            for (int64_t c = 0; c < channels; ++c) pad(b, c, image);
            for (int64_t group = 0; group < deep.groups; ++group)
                compute(b, 1, image, group, 0, 0, member);
        });
        return true;
    }
    for (int64_t first = 0; first < deep.batch; first += shares.together) {
        const int64_t left = deep.batch - first;
        const int64_t count = left < shares.together ? left : shares.together;
        const int64_t packing = first == 0 && !plan.packs_each ? packings : 0;
        share(threads, packing + count * channels, [&](int64_t at, int) {
            if (at < packing) return plan.pack(at, own + at * plan.packed());
            const int64_t b = (at - packing) / channels;
            pad(first + b, (at - packing) % channels, padded + b * plan.image());
        });
        // A part's slices one after the other, for which its weights stay in a cache.
        share(threads, deep.groups * shares.parts * shares.slices, [&](int64_t at, int member) {
            const int64_t part = at / shares.slices;
            compute(first, count, padded, part / shares.parts, part % shares.parts,
                    at % shares.slices, member);
        });
    }
    return true;
}

}  // namespace
}  // namespace ece408
