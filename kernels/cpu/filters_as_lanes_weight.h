// The gradient for the weights of many filters: lanes are filters, as in filters_as_lanes.h.
//
// Padded images lie with their channels side by side, so that those of one kernel row's taps are
// a run; dy lies with its filters side by side. A register tile is a few neighbours of such a run
// by one or two vectors of filters, summed over pixels, and carried on in double after kOuterBlock
// products. Threads take stretches of the batch, as many as weight_totals.h says, or of few images
// divide the tiles of one stretch among themselves.
#pragma once

#include "buffer.h"
#include "filters_as_lanes.h"
#include "team.h"
#include "weight_totals.h"

namespace ece408 {
namespace {

// Products after which a partial sum ends, if they make whole rows.
constexpr int64_t kOuterBlock = 512;
// Pixels of dy for which images are laid out at once.
constexpr int64_t kDeepPixelsAtOnce = 1024;

// `value`, at least 1 and at most `most`.
inline int64_t most_of(int64_t value, int64_t most) {
    return value < 1 ? 1 : value > most ? most : value;
}

// Pixels of some images: how far it is from column to column, row to row and image to image, in
// the padded images; dy's pixels lie side by side.
struct OuterPixels {
    int64_t images, rows, columns;
    int64_t column_step, row_step, image_step;
    int64_t dy_step, dy_image_step;
};

template <class Sum, int MV, int N>
__attribute__((noinline)) void outer_tile(const Sum* x, const Sum* dy, const OuterPixels& pixels,
                                          double* out) {
    using L = Lanes<Sum>;
    typename L::Vec sum[N][MV] = {};
    for (int64_t b = 0; b < pixels.images; ++b) {
        const Sum* gradient = dy + b * pixels.dy_image_step;
        for (int64_t i = 0; i < pixels.rows; ++i) {
            const Sum* at = x + b * pixels.image_step + i * pixels.row_step;
            for (int64_t j = 0; j < pixels.columns; ++j) {
                typename L::Vec from[MV];
#pragma GCC unroll 2
                for (int v = 0; v < MV; ++v) from[v] = L::load(gradient + v * L::count);
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) {
                    const typename L::Vec factor = L::broadcast(at[n]);
#pragma GCC unroll 2
                    for (int v = 0; v < MV; ++v) sum[n][v] += from[v] * factor;
                }
                gradient += pixels.dy_step;
                at += pixels.column_step;
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < MV; ++v)
            for (int64_t lane = 0; lane < L::count; ++lane) *out++ += sum[n][v][lane];
}

template <class Sum>
using OuterTile = void (*)(const Sum*, const Sum*, const OuterPixels&, double*);

template <class Sum, int MV, int N = kDeepPixels>
OuterTile<Sum> pick_outer_tile(int64_t run) {
    if constexpr (N > 1) {
        if (run < N) return pick_outer_tile<Sum, MV, N - 1>(run);
    }
    return outer_tile<Sum, MV, N>;
}

// The sums of one tile: rows of the kernel, then of each the runs, then blocks of filters.
struct OuterUnit {
    int64_t group, p, q, begin, count;  // count neighbours from `begin` of the run at tap (p, q)
    int64_t block;
};

struct OuterPlan {
    Sweep s;
    int64_t fold;            // rows of the kernel that lie side by side in a laid-out pixel
    int64_t runs, run;       // per fold: how many, and how long each is
    int64_t pieces, blocks;  // of a run; of filters
    int64_t lanes;           // filters of a block
    int64_t rows, row;       // of a laid-out image
    int64_t images;          // laid out at once

    int64_t folds() const { return s.kernel_h / fold; }
    int64_t units() const { return s.groups * folds() * runs * pieces * blocks; }
    int64_t pixel() const { return fold * s.group_channels; }
    int64_t image() const { return s.groups * rows * row * pixel(); }
    int64_t gradient() const { return s.groups * blocks * s.out_height * s.out_width * lanes; }
    OuterUnit unit(int64_t index) const {
        OuterUnit u;
        u.block = index % blocks;
        const int64_t piece = index / blocks % pieces;
        u.begin = run * piece / pieces;
        u.count = run * (piece + 1) / pieces - u.begin;
        index /= blocks * pieces;
        u.q = index % runs;
        u.p = index / runs % folds();
        u.group = index / runs / folds();
        return u;
    }
};

inline OuterPlan plan_outer(const Sweep& s, int64_t lanes) {
    OuterPlan plan = {};
    plan.s = s;
    // Of few channels, whole columns of the kernel's window are laid out side by side.
    plan.fold = s.group_channels * s.kernel_w < kDeepPixels ? s.kernel_h : 1;
    // Without dilation a kernel row's taps and their channels are one run of neighbours.
    plan.runs = s.dilate_w == 1 ? 1 : s.kernel_w;
    plan.run = plan.pixel() * (s.dilate_w == 1 ? s.kernel_w : 1);
    plan.pieces = (plan.run + kDeepPixels - 1) / kDeepPixels;
    plan.lanes = s.group_filters > lanes ? kDeepVectors * lanes : lanes;
    plan.blocks = (s.group_filters + plan.lanes - 1) / plan.lanes;
    plan.rows = plan.fold > 1 ? s.out_height
                              : (s.out_height - 1) * s.stride_h + (s.kernel_h - 1) * s.dilate_h + 1;
    plan.row = (s.out_width - 1) * s.stride_w + (s.kernel_w - 1) * s.dilate_w + 1;
    plan.images = kDeepPixelsAtOnce / (s.out_height * s.out_width);
    if (plan.images < 1) plan.images = 1;
    if (plan.images > s.batch) plan.images = s.batch;
    return plan;
}

// Row `y` of a group's laid-out image as [column][row of the fold][channel].
template <class T, class Sum>
void lay_out_row(const OuterPlan& plan, const T* source, int64_t y, Sum* out) {
    const Sweep& s = plan.s;
    memset(out, 0, static_cast<size_t>(plan.row * plan.pixel()) * sizeof(Sum));
    const int64_t begin = s.pad_w;
    const int64_t end = s.pad_w + s.width < plan.row ? s.pad_w + s.width : plan.row;
    for (int64_t p = 0; p < plan.fold; ++p) {
        const int64_t at = plan.fold > 1 ? y * s.stride_h + p * s.dilate_h : y;
        const int64_t from = at - s.pad_h;
        if (from < 0 || from >= s.height) continue;
        for (int64_t c = 0; c < s.group_channels; ++c) {
            const T* line = source + (c * s.height + from) * s.width - s.pad_w;
            Sum* to = out + p * s.group_channels + c;
            for (int64_t x = begin; x < end; ++x) to[x * plan.pixel()] = widen(line[x]);
        }
    }
}

// A block of filters of some pixels of dy as [pixel][filter], zeros for filters that do not exist.
template <class T, class Sum>
void lay_out_gradient(const OuterPlan& plan, const T* dy, int64_t block, int64_t first_pixel,
                      int64_t pixels, Sum* out) {
    const Sweep& s = plan.s;
    const int64_t plane = s.out_height * s.out_width, m = block * plan.lanes;
    const int64_t left = s.group_filters - m;
    interleave(dy + m * plane + first_pixel, plane, left < plan.lanes ? left : plan.lanes,
               plan.lanes, pixels, out);
}

// Adds one tile's products over all pixels of `count` images to its totals.
template <class Sum>
void add_outer(const OuterPlan& plan, const OuterUnit& u, const Sum* images, const Sum* gradients,
               int64_t count, double* totals) {
    const Sweep& s = plan.s;
    const int64_t vectors = plan.lanes / Lanes<Sum>::count;
    const auto tile = vectors == 1 ? pick_outer_tile<Sum, 1>(u.count)
                                   : pick_outer_tile<Sum, kDeepVectors>(u.count);
    const int64_t plane = s.out_height * s.out_width;
    const Sum* x = images + u.group * plan.rows * plan.row * plan.pixel() +
                   (u.p * s.dilate_h * plan.row + u.q * s.dilate_w) * plan.pixel() + u.begin;
    const Sum* dy = gradients + (u.group * plan.blocks + u.block) * plane * plan.lanes;
    const int64_t row_step = plan.fold > 1 ? 1 : s.stride_h;
    OuterPixels some = {1, 1, s.out_width, s.stride_w * plan.pixel(),
                        row_step * plan.row * plan.pixel(), plan.image(), plan.lanes,
                        plan.gradient()};
    const int64_t rows = most_of(kOuterBlock / s.out_width, s.out_height);
    const int64_t at_once = rows == s.out_height ? most_of(kOuterBlock / plane, count) : 1;
    for (int64_t b = 0; b < count; b += at_once)
        for (int64_t i = 0; i < s.out_height; i += rows) {
            some.images = most_of(count - b, at_once);
            some.rows = most_of(s.out_height - i, rows);
            tile(x + b * some.image_step + i * some.row_step,
                 dy + b * some.dy_image_step + i * s.out_width * plan.lanes, some, totals);
        }
}

template <class T>
void put_outer(const OuterPlan& plan, const OuterUnit& u, const WeightTotals& totals, int64_t index,
               const Textbook& book, bool accumulate, T* dw) {
    using Sum = typename Number<T>::Sum;
    const Sweep& s = plan.s;
    for (int64_t n = 0; n < u.count; ++n) {
        const int64_t at = u.begin + n, q = u.q + at / plan.pixel(), c = at % s.group_channels;
        const int64_t p = u.p + at % plan.pixel() / s.group_channels;
        for (int64_t lane = 0; lane < plan.lanes; ++lane) {
            const int64_t m = u.block * plan.lanes + lane;
            if (m >= s.group_filters) break;
            const int64_t filter = u.group * s.group_filters + m;
            T* to = dw + ((filter * s.group_channels + c) * s.kernel_h + p) * s.kernel_w + q;
            const double total =
                book.settled(totals.total(index + n * plan.lanes + lane), to);
            narrow(static_cast<Sum>(accumulate ? widen(*to) + total : total), to);
        }
    }
}

// Images laid out at once, with room for `images` of them.
template <class T, class Sum>
struct OuterLayout {
    const OuterPlan& plan;
    const T* x;
    const T* dy;
    Sum* images;
    Sum* gradients;

    static int64_t floats(const OuterPlan& plan) {
        return plan.images * (plan.image() + plan.gradient());
    }
    OuterLayout(const OuterPlan& plan, const T* x, const T* dy, Sum* memory)
        : plan(plan), x(x), dy(dy), images(memory),
          gradients(memory + plan.images * plan.image()) {}

    // Of `count` images from `first` on: the rows, those of dy, and the tiles there are.
    int64_t rows(int64_t count) const { return count * plan.s.groups * plan.rows; }
    int64_t gradient_rows(int64_t count) const {
        return count * plan.s.groups * plan.blocks * plan.s.out_height;
    }
    void row(int64_t first, int64_t at) const {
        const Sweep& s = plan.s;
        const int64_t of = first * s.groups + at / plan.rows;
        lay_out_row(plan, x + of * s.group_channels * s.height * s.width, at % plan.rows,
                    images + at * plan.row * plan.pixel());
    }
    void gradient_row(int64_t first, int64_t at) const {
        const Sweep& s = plan.s;
        const int64_t block = at / s.out_height % plan.blocks;
        const int64_t of = first * s.groups + at / s.out_height / plan.blocks;
        lay_out_gradient(plan, dy + of * s.group_filters * s.out_height * s.out_width, block,
                         at % s.out_height * s.out_width, s.out_width,
                         gradients + at * s.out_width * plan.lanes);
    }
    void tile(int64_t unit, int64_t count, double* totals) const {
        add_outer(plan, plan.unit(unit), images, gradients, count,
                  totals + unit * kDeepPixels * plan.lanes);
    }
};

// Images [begin, end) by one thread.
template <class T, class Sum>
void add_stretch(const OuterLayout<T, Sum>& layout, int64_t begin, int64_t end, double* totals) {
    const OuterPlan& plan = layout.plan;
    for (int64_t first = begin; first < end; first += plan.images) {
        const int64_t count = end - first < plan.images ? end - first : plan.images;
        for (int64_t at = 0; at < layout.rows(count); ++at) layout.row(first, at);
        for (int64_t at = 0; at < layout.gradient_rows(count); ++at)
            layout.gradient_row(first, at);
        for (int64_t unit = 0; unit < plan.units(); ++unit) layout.tile(unit, count, totals);
    }
}

// All images, some at a time by all threads.
template <class T, class Sum>
void add_together(const OuterLayout<T, Sum>& layout, double* totals, int threads) {
    const OuterPlan& plan = layout.plan;
    for (int64_t first = 0; first < plan.s.batch; first += plan.images) {
        const int64_t left = plan.s.batch - first;
        const int64_t count = left < plan.images ? left : plan.images;
        const int64_t rows = layout.rows(count);
        share(threads, rows + layout.gradient_rows(count), [&](int64_t at, int) {
            if (at < rows)
                layout.row(first, at);
            else
                layout.gradient_row(first, at - rows);
        });
        share(threads, plan.units(),
              [&](int64_t unit, int) { layout.tile(unit, count, totals); });
    }
}

// Returns false if there is no memory, and then has written nothing.
template <class Sum, class T>
bool run_deep_weight(const Sweep& s, const Textbook& book, const T* x, const T* dy, T* dw,
                     bool accumulate, int threads) {
    const OuterPlan plan = plan_outer(s, Lanes<Sum>::count);
    const int64_t tile = kDeepPixels * plan.lanes, units = plan.units();
    const WeightTotals totals = weight_totals(units * tile, s.batch);
    const int64_t floats = OuterLayout<T, Sum>::floats(plan);
    const Buffer<Sum> memory((totals.stretches > 1 ? threads : 1) * floats);
    if (!totals.sums || !memory) return false;
    const auto layout = [&](int64_t member) {
        return OuterLayout<T, Sum>(plan, x, dy, memory + member * floats);
    };
    add_images(totals, layout, threads);
    share(threads, units, [&](int64_t unit, int) {
        put_outer(plan, plan.unit(unit), totals, unit * tile, book, accumulate, dw);
    });
    return true;
}

}  // namespace
}  // namespace ece408
