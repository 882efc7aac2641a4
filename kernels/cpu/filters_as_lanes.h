// Convolutions with many filters and long sums: lanes are filters, pixels are broadcast.
//
// A register tile holds a few neighbouring output pixels by one or two vectors of filters. Every
// lane is used whatever the size of the plane and its stride, for the price of a transposition at
// the end, so this is for sums long enough to pay for it; pixels_as_lanes.h has pixels as lanes.
//
// The source is padded once per image; a tap is a displacement in it. The gradient for x of a
// strided convolution is one such sum for each residue of x's rows and columns modulo the stride,
// with only the taps that reach it, so that no zeros are multiplied. Without strides, higher
// kernels take two output rows at a time with fewer products, as winograd_f23.h explains: then the
// source is four domains instead, and there is one such sum for each.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "buffer.h"
#include "flat_image.h"
#include "interleave.h"
#include "lanes.h"
#include "team.h"
#include "textbook.h"
#include "winograd_f23.h"

namespace ece408 {
namespace {

// Vectors of filters, and pixels, of a tile.
constexpr int kDeepVectors = 2;
constexpr int kDeepPixels = ECE408_LANES == 16 ? 14 : ECE408_LANES == 8 ? 6 : 4;
// Products after which a partial sum ends, so that long sums lose less to rounding.
constexpr int64_t kDeepBlock = 256;
// Pixels that a thread computes at a time, for one block of filters.
constexpr int64_t kDeepStretch = 256;
// Pieces for each thread, where they do not come out even; those that a block of filters is cut into.
constexpr int64_t kDeepPieces = 8, kDeepSlices = 2;

// The output pixels (row + i * row_step, column + j * column_step), and the taps they sum.
struct Phase {
    int64_t row, column, rows, columns;
    int64_t taps, first_tap;  // in DeepPlan::window: this phase's part
};

struct DeepTap {
    int64_t p, q;          // of the kernel
    int64_t down, across;  // from pixel (i, j) of the phase, the source's (i * step + down, ...)
};

// A sum over channels and taps for images of one group's channels.
struct Deep : Shape {
    int64_t step_h, step_w;          // of the source from output pixel to output pixel
    int64_t out_step_h, out_step_w;  // of the output from pixel to pixel of a phase
    int64_t top, left, rows, row;    // the padded source: its border and its size
    int64_t window;                  // taps of all phases
    int64_t phases;
    bool by_pairs;
    Pairs pairs;        // then: how rows are taken,
    int64_t direction;  // and the step from a tap's row of the weights to the next tap's
    Buffer<Phase> phase;
    Buffer<DeepTap> tap;
};

// A sum for images of such a shape. False without memory.
inline bool begin(const Shape& shape, int64_t phases, int64_t window, Deep* deep) {
    static_cast<Shape&>(*deep) = shape;
    deep->phase = Buffer<Phase>(phases);
    deep->tap = Buffer<DeepTap>(window);
    deep->phases = phases;
    deep->window = 0;
    deep->by_pairs = false;
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
    d->row = high_w - low_w + 1;
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

// Forward or, with `turned` weights and its own sweep, the gradient for x. Phases are domains.
inline bool deep_by_pairs(const Sweep& s, bool turned, Deep* d) {
    const Pairs pairs = pairs_of(s.kernel_h, s.out_height);
    if (!begin(s, kDomains, pairs.taps() * s.kernel_w, d)) return false;
    d->by_pairs = true;
    d->pairs = pairs;
    d->direction = turned ? -1 : 1;
    d->step_h = d->step_w = d->out_step_h = d->out_step_w = 1;
    d->top = s.pad_h, d->left = s.pad_w;
    d->rows = kDomains * pairs.starts();
    d->row = s.out_width + (s.kernel_w - 1) * s.dilate_w;
    for (int t = 0; t < kDomains; ++t) {
        Phase& phase = d->phase[t];
        phase = {0, 0, pairs.pairs, s.out_width, 0, d->window};
        for (int64_t g = pairs.first_group(t); g < pairs.groups; ++g)
            for (int64_t q = 0; q < s.kernel_w; ++q)
                d->tap[d->window++] = {turned ? s.kernel_h - 1 - 2 * g : 2 * g,
                                       turned ? s.kernel_w - 1 - q : q, t * pairs.starts() + g,
                                       q * s.dilate_w};
        phase.taps = d->window - phase.first_tap;
    }
    return true;
}

// R rows of P pixels, `row` and `step` apart.
template <class Sum, int MV, int R, int P, int STEP>
__attribute__((noinline)) void deep_tile(const Sum* pixel, int64_t row, int64_t step,
                                         const int64_t* taps, int64_t count, const Sum* weight,
                                         bool add, Sum* out) {
    using L = Lanes<Sum>;
    const int64_t next = STEP ? STEP : step;
    typename L::Vec sum[R * P][MV] = {};
    for (int64_t t = 0; t < count; ++t) {
        const Sum* at = pixel + taps[t];
        typename L::Vec w[MV];
#pragma GCC unroll 2
        for (int v = 0; v < MV; ++v) w[v] = L::load(weight + (t * MV + v) * L::count);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p) {
                const typename L::Vec x = L::broadcast(at[r * row + p * next]);
#pragma GCC unroll 2
                for (int v = 0; v < MV; ++v) sum[r * P + p][v] += w[v] * x;
            }
    }
#pragma GCC unroll 16
    for (int p = 0; p < R * P; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < MV; ++v) {
            Sum* place = out + (p * MV + v) * L::count;
            L::store(place, add ? L::load(place) + sum[p][v] : sum[p][v]);
        }
}

template <class Sum>
using DeepTile = void (*)(const Sum*, int64_t, int64_t, const int64_t*, int64_t, const Sum*, bool,
                          Sum*);

template <class Sum, int MV, int STEP, int R = 1, int P = kDeepPixels / R>
DeepTile<Sum> pick_deep_pixels(int64_t pixels) {
    if constexpr (P > 1) {
        if (pixels < P) return pick_deep_pixels<Sum, MV, STEP, R, P - 1>(pixels);
    }
    return deep_tile<Sum, MV, R, P, STEP>;
}

template <class Sum>
DeepTile<Sum> pick_deep_tile(int64_t vectors, int64_t step, int64_t pixels) {
    if (vectors == 1) return pick_deep_pixels<Sum, 1, 0>(pixels);
    if (step == 1) return pick_deep_pixels<Sum, 2, 1>(pixels);
    return pick_deep_pixels<Sum, 2, 0>(pixels);
}

// Two short rows of pixels side by side, by which weights are read half as often.
template <class Sum>
DeepTile<Sum> pick_deep_rows(int64_t vectors, int64_t pixels) {
    return vectors == 1 ? pick_deep_pixels<Sum, 1, 1, 2>(pixels)
                        : pick_deep_pixels<Sum, 2, 1, 2>(pixels);
}

// Where the weight for filter m (a lane) and channel c of a group lies: first + group * group_step
// + m * filter_step + c * channel_step + p * kernel_w + q.
template <class T>
struct DeepWeights {
    const T* first;
    int64_t group_step, filter_step, channel_step, kernel_w;
};

// The reverse, for `count` pixels: out[m * step + k * spread] becomes rows[k * wide + m] plus the
// filter's start, if there are any, or has that added.
template <class T, class Sum>
void part_spread(const Sum* rows, int64_t wide, int64_t count, const T* start, bool accumulate,
                 T* out, int64_t step, int64_t filters, int64_t spread) {
    for (int64_t m = 0; m < filters; ++m) {
        const Sum first = start ? static_cast<Sum>(widen(start[m])) : Sum(0);
        T* to = out + m * step;
        for (int64_t k = 0; k < count; ++k, to += spread) {
            const Sum value = rows[k * wide + m] + first;
            narrow(accumulate ? static_cast<Sum>(widen(*to) + value) : value, to);
        }
    }
}

template <class T, class Sum>
void part(const Sum* rows, int64_t wide, int64_t count, const T* start, bool accumulate, T* out,
          int64_t step, int64_t filters) {
    part_spread(rows, wide, count, start, accumulate, out, step, filters, 1);
}

#if defined(__SSE2__)
inline void part(const float* rows, int64_t wide, int64_t count, const float* start,
                 bool accumulate, float* out, int64_t step, int64_t filters) {
    const int64_t square_filters = filters / 4 * 4, square_count = count / 4 * 4;
    for (int64_t m = 0; m < square_filters; m += 4)
        for (int64_t k = 0; k < square_count; k += 4) {
            const float* from = rows + k * wide + m;
            __m128 value[4] = {_mm_loadu_ps(from), _mm_loadu_ps(from + wide),
                               _mm_loadu_ps(from + 2 * wide), _mm_loadu_ps(from + 3 * wide)};
            _MM_TRANSPOSE4_PS(value[0], value[1], value[2], value[3]);
            for (int64_t i = 0; i < 4; ++i) {
                float* to = out + (m + i) * step + k;
                __m128 sum = start ? _mm_add_ps(value[i], _mm_set1_ps(start[m + i])) : value[i];
                if (accumulate) sum = _mm_add_ps(_mm_loadu_ps(to), sum);
                _mm_storeu_ps(to, sum);
            }
        }
    // What is left: the last pixels of these filters, and all of the last filters'.
    part_spread(rows + square_count * wide, wide, count - square_count, start, accumulate,
                out + square_count, step, square_filters, 1);
    part_spread(rows + square_filters, wide, count, start ? start + square_filters : nullptr,
                accumulate, out + square_filters * step, step, filters - square_filters, 1);
}
#endif

// What is prepared once for a call and shared by its threads.
template <class T, class Sum>
struct DeepPlan {
    const Deep& deep;
    DeepWeights<T> weights;
    Textbook book;    // of the output
    int64_t blocks;   // of filters, in a group
    // Per phase [channel][tap]: from pixel (0, 0)'s place in the padded source.
    Buffer<int64_t> offset;

    DeepPlan(const Deep& deep, const DeepWeights<T>& weights, const Textbook& book)
        : deep(deep), weights(weights), book(book) {
        const int64_t most = kDeepVectors * Lanes<Sum>::count;
        blocks = (deep.group_filters + most - 1) / most;
    }

    int64_t units() const { return deep.groups * blocks; }
    int64_t channel() const { return deep.rows * deep.row; }
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
    int64_t stretch_rows(const Phase& phase) const {
        const int64_t rows = kDeepStretch / (phase.columns > 0 ? phase.columns : 1);
        return rows < 1 ? 1 : rows;
    }
    int64_t sums() const {
        return (deep.by_pairs ? kDomains : 1) * phase_sums();
    }
    int64_t phase_sums() const {
        const int64_t pixels = deep.out_width > kDeepStretch ? deep.out_width : kDeepStretch;
        return pixels * kDeepVectors * Lanes<Sum>::count;
    }

    void fill_offsets() {
        for (int64_t n = 0; n < deep.phases; ++n) {
            const Phase& phase = deep.phase[n];
            int64_t* next = offset + deep.group_channels * phase.first_tap;
            for (int64_t c = 0; c < deep.group_channels; ++c)
                for (int64_t t = 0; t < phase.taps; ++t) {
                    const DeepTap& tap = deep.tap[phase.first_tap + t];
                    const int64_t border =
                        deep.by_pairs ? 0 : deep.top * deep.row + deep.left;
                    *next++ = c * channel() + border + tap.down * deep.row + tap.across;
                }
        }
    }

    // A block's weights as [phase][channel][tap][filter], zeros for filters that do not exist.
    void pack(int64_t unit, Sum* out) const {
        const int64_t block = unit % blocks, wide = vectors(block) * Lanes<Sum>::count;
        const T* first = weights.first + unit / blocks * weights.group_step +
                         this->first(block) * weights.filter_step;
        if (deep.by_pairs) return pack_pairs(block, first, out);
        const bool whole = deep.phases == 1;
        if (whole && weights.channel_step == deep.window) {
            interleave(first, weights.filter_step, filters(block), wide,
                       deep.group_channels * deep.window, out);
            return;
        }
        for (int64_t n = 0; n < deep.phases; ++n) {
            const Phase& phase = deep.phase[n];
            const DeepTap* taps = deep.tap + phase.first_tap;
            for (int64_t c = 0; c < deep.group_channels; ++c, out += phase.taps * wide) {
                const T* from = first + c * weights.channel_step;
                if (whole) {
                    interleave(from, weights.filter_step, filters(block), wide, phase.taps, out);
                    continue;
                }
                for (int64_t t = 0; t < phase.taps; ++t)
                    interleave(from + taps[t].p * weights.kernel_w + taps[t].q,
                               weights.filter_step, filters(block), wide, 1, out + t * wide);
            }
        }
    }

    // The same for domains, whose weights are sums of up to three taps. A few channels at a time.
    void pack_pairs(int64_t block, const T* first, Sum* out) const {
        constexpr int64_t kChannels = 4;
        Sum taps[kChannels * kMostPairTaps * kDeepVectors * Lanes<Sum>::count];
        const int64_t wide = vectors(block) * Lanes<Sum>::count;
        const int64_t window = deep.pairs.kernel * weights.kernel_w;
        const bool together = weights.channel_step == window;
        for (int64_t c = 0; c < deep.group_channels; c += kChannels) {
            const int64_t left = deep.group_channels - c, count = left < kChannels ? left : kChannels;
            const T* from = first + c * weights.channel_step;
            for (int64_t i = 0; i < (together ? 1 : count); ++i)
                interleave(from + i * weights.channel_step, weights.filter_step, filters(block),
                           wide, together ? count * window : window, taps + i * window * wide);
            for (int64_t i = 0; i < count; ++i)
                combine_taps(c + i, taps + i * window * wide, wide, out);
        }
    }

    // One channel's weights for all domains, from its taps as [p][q][filter].
    void combine_taps(int64_t c, const Sum* taps, int64_t wide, Sum* out) const {
        for (int t = 0; t < kDomains; ++t) {
            const Phase& phase = deep.phase[t];
            Sum* to = out + (deep.group_channels * phase.first_tap + c * phase.taps) * wide;
            for (int64_t k = 0; k < phase.taps; ++k, to += wide) {
                const DeepTap& tap = deep.tap[phase.first_tap + k];
                const Sum* g0 = taps + (tap.p * weights.kernel_w + tap.q) * wide;
                const int64_t next = deep.direction * weights.kernel_w * wide;
                const int64_t group = tap.down - t * deep.pairs.starts();
                if (deep.pairs.has_third(group))
                    for (int64_t m = 0; m < wide; ++m)
                        to[m] = domain_weight<Sum>(t, g0[m], g0[next + m], g0[2 * next + m]);
                else
                    for (int64_t m = 0; m < wide; ++m)
                        to[m] = domain_weight<Sum>(t, g0[m], g0[next + m], Sum(0));
            }
        }
    }

    // A channel's domains, one under the other.
    void transform(const T* source, Sum* out) const {
        const int64_t starts = deep.pairs.starts(), step = starts * deep.row;
        memset(out, 0, static_cast<size_t>(channel()) * sizeof(Sum));
        for (int64_t start = 0; start < starts; ++start, out += deep.row) {
            const T* d[4];
            bool inside = true;
            for (int64_t r = 0; r < 4; ++r) {
                const int64_t from = 2 * start + r - deep.top;
                const bool there = from >= 0 && from < deep.height;
                d[r] = there ? source + from * deep.width : nullptr;
                inside = inside && there;
            }
            Sum* to = out + deep.left;
            if (inside)
                for (int64_t x = 0; x < deep.width; ++x)
                    to_domains<Sum>(widen(d[0][x]), widen(d[1][x]), widen(d[2][x]),
                                    widen(d[3][x]), to + x, step);
            else
                for (int64_t x = 0; x < deep.width; ++x)
                    to_domains(value(d[0], x), value(d[1], x), value(d[2], x), value(d[3], x),
                               to + x, step);
        }
    }

    static Sum value(const T* row, int64_t x) { return row ? widen(row[x]) : Sum(0); }

    void pad(const T* source, Sum* out) const {
        if (deep.by_pairs) return transform(source, out);
        const size_t border = static_cast<size_t>(deep.row) * sizeof(Sum);
        for (int64_t y = 0; y < deep.rows; ++y, out += deep.row) {
            memset(out, 0, border);
            const int64_t from = y - deep.top;
            if (from < 0 || from >= deep.height) continue;
            for (int64_t x = 0; x < deep.width; ++x)
                out[deep.left + x] = widen(source[from * deep.width + x]);
        }
    }

    // The sums of rows [begin, end) of a phase for one block of filters, as [row][pixel][filter].
    void sum_rows(const Sum* image, int64_t group, int64_t block, const Phase& phase,
                  int64_t begin, int64_t end, const Sum* packed, Sum* sums) const {
        const int64_t vectors = this->vectors(block), wide = vectors * Lanes<Sum>::count;
        const int64_t tiles = (phase.columns + kDeepPixels - 1) / kDeepPixels;
        const int64_t products = deep.group_channels * phase.taps;
        const Sum* weights = packed + deep.group_channels * phase.first_tap * wide;
        const int64_t* offsets = offset + deep.group_channels * phase.first_tap;
        image += group * deep.group_channels * channel();
        int64_t done = 0;
        do {
            const int64_t left = products - done;
            const int64_t count = left < kDeepBlock ? left : kDeepBlock;
            Sum* out = sums;
            int64_t i = begin;
            if (deep.step_w == 1 && 2 * phase.columns <= kDeepPixels)
                for (const auto two_rows = pick_deep_rows<Sum>(vectors, phase.columns); i + 1 < end;
                     i += 2, out += 2 * phase.columns * wide)
                    two_rows(image + i * deep.step_h * deep.row, deep.step_h * deep.row, 1,
                             offsets + done, count, weights + done * wide, done > 0, out);
            for (; i < end; ++i)
                for (int64_t tile = 0; tile < tiles; ++tile) {
                    const int64_t j = phase.columns * tile / tiles;
                    const int64_t pixels = phase.columns * (tile + 1) / tiles - j;
                    const Sum* at = image + i * deep.step_h * deep.row + j * deep.step_w;
                    pick_deep_tile<Sum>(vectors, deep.step_w, pixels)(
                        at, 0, deep.step_w, offsets + done, count, weights + done * wide,
                        done > 0, out);
                    out += pixels * wide;
                }
            done += count;
        } while (done < products);
    }

    // They become rows [begin, end) of a phase of the output.
    void write_rows(int64_t group, int64_t block, const Phase& phase, int64_t begin, int64_t end,
                    const T* bias, bool accumulate, Sum* sums, T* y) const {
        const int64_t wide = vectors(block) * Lanes<Sum>::count;
        const bool finite = all_finite(sums, (end - begin) * phase.columns * wide);
        const int64_t filter = group * deep.group_filters + first(block);
        const int64_t plane = deep.out_height * deep.out_width;
        for (int64_t i = begin; i < end; ++i, sums += phase.columns * wide) {
            const int64_t row = phase.row + i * (deep.by_pairs ? 2 : deep.out_step_h);
            T* to = y + filter * plane + row * deep.out_width + phase.column;
            const T* start = bias ? bias + filter : nullptr;
            for (int64_t m = 0; m < (finite ? 0 : filters(block)); ++m)
                settle(book, sums + m, wide, phase.columns, to + m * plane, deep.out_step_w);
            if (deep.out_step_w == 1)
                part(sums, wide, phase.columns, start, accumulate, to, plane, filters(block));
            else
                part_spread(sums, wide, phase.columns, start, accumulate, to, plane,
                            filters(block), deep.out_step_w);
        }
    }

    void run_rows(const Sum* image, int64_t group, int64_t block, const Phase& phase,
                  int64_t begin, int64_t end, const Sum* packed, const T* bias, bool accumulate,
                  Sum* sums, T* y) const {
        sum_rows(image, group, block, phase, begin, end, packed, sums);
        write_rows(group, block, phase, begin, end, bias, accumulate, sums, y);
    }

    // Pairs [begin, end) of output rows.
    void run_pairs(const Sum* image, int64_t group, int64_t block, int64_t begin, int64_t end,
                   const Sum* packed, const T* bias, bool accumulate, Sum* sums, T* y) const {
        const int64_t wide = vectors(block) * Lanes<Sum>::count, step = phase_sums();
        for (int t = 0; t < kDomains; ++t)
            sum_rows(image, group, block, deep.phase[t], begin, end, packed, sums + t * step);
        for (int64_t i = 0; i < (end - begin) * deep.out_width * wide; ++i)
            to_rows(sums + i, step);
        for (int64_t odd = 0; odd < 2; ++odd) {
            // Every second row of the output, as many as there are.
            const Phase rows = {odd, 0, (deep.out_height + 1 - odd) / 2, deep.out_width, 0, 0};
            write_rows(group, block, rows, begin, end < rows.rows ? end : rows.rows, bias,
                       accumulate, sums + odd * step, y);
        }
    }

    // Slice `slice` of `slices` of a block's output rows.
    void run_block(const Sum* image, int64_t unit, int64_t slice, int64_t slices,
                   const Sum* packed, const T* bias, bool accumulate, Sum* sums, T* y) const {
        const int64_t group = unit / blocks, block = unit % blocks;
        for (int64_t n = 0; n < (deep.by_pairs ? 1 : deep.phases); ++n) {
            const Phase& phase = deep.phase[n];
            const int64_t rows = stretch_rows(phase), end = phase.rows * (slice + 1) / slices;
            if (phase.columns == 0) continue;
            for (int64_t i = phase.rows * slice / slices; i < end; i += rows) {
                const int64_t next = i + rows < end ? i + rows : end;
                if (deep.by_pairs)
                    run_pairs(image, group, block, i, next, packed, bias, accumulate, sums, y);
                else
                    run_rows(image, group, block, phase, i, next, packed, bias, accumulate, sums,
                             y);
            }
        }
    }
};

// Whether threads share so many pieces evenly, or almost.
inline bool are_shared_evenly(int64_t pieces, int threads) {
    return pieces % threads == 0 ? pieces > threads : pieces >= kDeepPieces * threads;
}

// How the work of a call is cut into pieces.
struct DeepShares {
    bool by_image;     // a thread pads an image and computes all of it
    bool by_unit;      // else: a thread packs a unit's weights and computes all images with them
    int64_t together;  // images that are padded before any is computed
    int64_t slices;    // of an image's rows

    // `image` and `packed`: numbers of a padded image, and of a unit's weights. What is larger
    // stays in a thread's own cache.
    DeepShares(int64_t batch, int64_t units, int64_t image, int64_t packed, int threads) {
        by_image = threads == 1 || (batch >= 2 * threads && image >= packed);
        by_unit = !by_image && are_shared_evenly(units, threads);
        together = by_image ? 1 : images_together(batch, image);
        const int64_t pieces = units * together;
        slices = 1;
        if (by_image || by_unit || are_shared_evenly(pieces, threads)) return;
        const int64_t wanted = (kDeepPieces * threads + pieces - 1) / pieces;
        slices = wanted < kDeepSlices * threads ? wanted : kDeepSlices * threads;
    }
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
bool run_deep(DeepPlan<T, Sum>* made, const Sum* kept, const T* source, const T* bias, T* out,
              bool accumulate, int threads) {
    DeepPlan<T, Sum>& plan = *made;
    const Deep& deep = plan.deep;
    const int64_t channels = deep.groups * deep.group_channels, pixels = deep.height * deep.width;
    const int64_t out_image =
        deep.groups * deep.group_filters * deep.out_height * deep.out_width;
    const int64_t units = plan.units();
    const DeepShares shares(deep.batch, units, plan.image(), plan.packed(), threads);
    const int64_t images = shares.by_image ? threads : shares.together;
    const int64_t packings = kept ? 0 : shares.by_unit ? threads : units;
    const Buffer<Sum> memory(images * plan.image() + threads * plan.sums() +
                             packings * plan.packed());
    plan.offset = Buffer<int64_t>(deep.group_channels * deep.window);
    if (!memory || !plan.offset) return false;
    plan.fill_offsets();
    Sum* scratch = memory + images * plan.image();
    Sum* const own = scratch + threads * plan.sums();
    const Sum* const packed = kept ? kept : own;
    const auto pad = [&](int64_t b, int64_t c, Sum* image) {
        plan.pad(source + (b * channels + c) * pixels, image + c * plan.channel());
    };
    const auto compute = [&](int64_t b, const Sum* image, int64_t unit, int64_t slice,
                             const Sum* weights, int member) {
        plan.run_block(image, unit, slice, shares.slices, weights, bias, accumulate,
                       scratch + member * plan.sums(), out + b * out_image);
    };
    if (shares.by_image) {
        if (!kept) pack_deep(plan, own, threads);
        share(threads, deep.batch, [&](int64_t b, int member) {
            Sum* image = memory + member * plan.image();
            for (int64_t c = 0; c < channels; ++c) pad(b, c, image);
            for (int64_t unit = 0; unit < units; ++unit)
                compute(b, image, unit, 0, packed + unit * plan.packed(), member);
        });
        return true;
    }
    for (int64_t first = 0; first < deep.batch; first += shares.together) {
        const int64_t left = deep.batch - first;
        const int64_t count = left < shares.together ? left : shares.together;
        const int64_t packing = first == 0 && !kept && !shares.by_unit ? units : 0;
        share(threads, packing + count * channels, [&](int64_t at, int) {
            if (at < packing) return plan.pack(at, own + at * plan.packed());
            const int64_t b = (at - packing) / channels;
            pad(first + b, (at - packing) % channels, memory + b * plan.image());
        });
        if (shares.by_unit) {
            share(threads, units, [&](int64_t unit, int member) {
                if (!kept) plan.pack(unit, own + member * plan.packed());
                const Sum* const weights = packed + (kept ? unit : member) * plan.packed();
                for (int64_t b = 0; b < count; ++b)
                    compute(first + b, memory + b * plan.image(), unit, 0, weights, member);
            });
            continue;
        }
        // A unit's images one after the other, for which its weights stay in a cache.
        share(threads, units * count * shares.slices, [&](int64_t at, int member) {
            const int64_t b = at / shares.slices % count, unit = at / shares.slices / count;
            compute(first + b, memory + b * plan.image(), unit, at % shares.slices,
                    packed + unit * plan.packed(), member);
        });
    }
    return true;
}

}  // namespace
}  // namespace ece408
