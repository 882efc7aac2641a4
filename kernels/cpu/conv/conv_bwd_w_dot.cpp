// The gradient for w as dot products of dy with shifted images (flat_image.h), vectorised over
// pixels. Compiled once per instruction set, with ECE408_ISA its name and ECE408_LANES the floats
// of a vector; only the constant at the end is not local.
//
// dy is copied with the images' row length and zeros between its rows, so that each weight's
// gradient is a dot product over flat runs. Nothing is transposed, and all kernel sizes, strides
// and numbers of channels cost the same per product. Pixels are processed in chunks: dy of a block
// of filters stays in the second-level cache, x of a few channels in the first. Sums of a chunk are
// added to totals in double. Layers with 1x1 kernels whose planes are whole vectors are read in
// place.
//
// For higher kernels with sums in float, Winograd's F(3,2) takes two rows of dy at a time, with 4
// products instead of 6, 7 instead of 10, or 10 instead of 14. For rows x0 to x3 of x and
// rows dy0 and dy1,
//
//     d0 = dy0 * (x0 - x2)              dw0 = d0 + (d1 + d2) / 2
//     d1 = (dy0 + dy1) * (x1 + x2)      dw1 = (d1 - d2) / 2
//     d2 = (dy0 - dy1) * (x2 - x1)      dw2 = (d1 + d2) / 2 + d3
//     d3 = dy1 * (x3 - x1)
//
// The factors of each d, a component, are stored, and its products are summed over all row pairs.
// Kernels of other heights are divided into groups of two rows, which need no d3, and a last group
// of three. With a stride, the rows of each residue modulo the stride are a kernel of their own, as
// in winograd_f23.h.
//
// A task is some filters by some channels over one split of the chunks (split-K). Their number
// depends on the problem only, and splits are added up in order, so results do not depend on the
// number of threads.
#include "api/kernels.h"

#include <type_traits>

#include "conv/bwd_w_dot_plan.h"
#include "conv/bwd_w_dot_rows.h"
#include "conv/flat_image.h"
#include "conv/textbook.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/dot_tile.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// Some filters by some sets of channels of a group.
struct WeightPlace {
    int64_t group;
    Span tiles, sets;
};

inline WeightPlace place_of(const WeightPlan& plan, int64_t index) {
    const int64_t sets = index % plan.channel_blocks, tiles = index / plan.channel_blocks;
    return {tiles / plan.filter_blocks,
            span_of(plan.filter_tiles, plan.filter_blocks, tiles % plan.filter_blocks),
            span_of(plan.channel_sets, plan.channel_blocks, sets)};
}

template <class T, class Sum>
struct WeightCall {
    const WeightPlan& plan;
    const Textbook& book;
    const T* x;
    const T* dy;
    T* dw;
    bool accumulate;

    Span filters(int64_t tile) const {
        const int64_t begin = tile * kDotFilters, end = begin + kDotFilters;
        return {begin, end < plan.s.group_filters ? end : plan.s.group_filters};
    }
    Span channels(int64_t set) const {
        return span_of(plan.s.group_channels, plan.channel_sets, set);
    }
    Span taps(const Span& channels, const Column& column) const {
        return span_of(channels.count() * column.taps, column.tiles, column.tile);
    }
    int64_t slot(const WeightPlace& place, int64_t set, int64_t column, int64_t filters) const {
        const int64_t tiles = (set - place.sets.begin) * plan.columns() + column;
        return (tiles * place.tiles.count() + filters - place.tiles.begin) * kDotsOfTile;
    }

    // Elements per thread of a chunk's x and dy.
    int64_t x_size() const { return plan.in_place ? 0 : plan.most_channels() * plan.f.channel; }
    int64_t scratch_size() const {
        const bool copies = plan.strides() || !std::is_same<T, Sum>::value;
        return plan.winograd && copies ? plan.scratch(Lanes<Sum>::count) : 0;
    }
    // Rows are written in whole vectors.
    int64_t dy_size() const {
        if (plan.in_place) return 0;
        return plan.most_tiles() * kDotFilters * plan.components * plan.dy_row + Lanes<Sum>::count;
    }

    const T* plane_of_x(int64_t group, int64_t channel) const {
        return x + (group * plan.s.group_channels + channel) * plan.s.height * plan.s.width;
    }
    const T* plane_of_dy(int64_t group, int64_t filter) const {
        return dy + (group * plan.s.group_filters + filter) * plan.s.out_height * plan.s.out_width;
    }
    // Prefetches of a set's x in a chunk, and of dy for all filters of a place.
    RowPrefetch prefetch_of_set(int64_t group, const Span& some, const Chunk& chunk) const {
        const Sweep& s = plan.s;
        const Span rows_of_dy = plan.rows_of(chunk);
        int64_t begin = rows_of_dy.begin * s.stride_h - s.pad_h;
        int64_t end =
            (rows_of_dy.end - 1) * s.stride_h + (s.kernel_h - 1) * s.dilate_h + 1 - s.pad_h;
        if (begin < 0) begin = 0;
        if (end > s.height) end = s.height;
        if (begin >= end) return {};
        const T* first = plane_of_x(group, some.begin) +
                         chunk.images.begin * plan.image_of_x();
        const bool apart = s.stride_h > (s.kernel_h - 1) * s.dilate_h + 1;
        const int64_t rows = apart ? divide_up(end - begin, s.stride_h) : 1;
        return RowPrefetch(first + begin * s.width, some.count(), s.height * s.width,
                           chunk.images.count(), plan.image_of_x(), rows,
                           s.stride_h * s.width, apart ? s.width : (end - begin) * s.width);
    }
    RowPrefetch prefetch_of_filters(const WeightPlace& place, const Chunk& chunk) const {
        const Sweep& s = plan.s;
        const int64_t plane = s.out_height * s.out_width;
        const Span some = {filters(place.tiles.begin).begin, filters(place.tiles.end - 1).end};
        const T* first = plane_of_dy(place.group, some.begin) +
                         chunk.images.begin * plan.image_of_dy() +
                         plan.rows_of(chunk).begin * s.out_width;
        return RowPrefetch(first, some.count(), plane, chunk.images.count(), plan.image_of_dy(), 1, 0,
                           plan.rows_of(chunk).count() * s.out_width);
    }

    // Adds the products of a task's chunks.
    void add_chunks(const WeightPlace& place, const Span& chunks, Sum* x_chunk, Sum* dy_chunk,
                    Sum* scratch, double* totals) const {
        const int64_t first = filters(place.tiles.begin).begin;
        for (int64_t index = chunks.begin; index < chunks.end; ++index) {
            const Chunk chunk = plan.chunk(index);
            // The next split is probably also this thread's.
            const bool last = index + 1 == plan.chunks();
            const Chunk next = plan.chunk(last ? index : index + 1);
            if constexpr (std::is_same<T, Sum>::value) {
                if (plan.in_place) {
                    for (int64_t set = place.sets.begin; set < place.sets.end; ++set)
                        add_set_in_place(place, set, chunk, next, totals);
                    continue;
                }
            }
            RowPrefetch dy_ahead = last ? RowPrefetch() : prefetch_of_filters(place, next);
            for (int64_t m = first; m < filters(place.tiles.end - 1).end; ++m)
                copy_filter(plan, plane_of_dy(place.group, m), chunk, scratch,
                            dy_chunk + (m - first) * plan.components * plan.dy_row);
            for (int64_t set = place.sets.begin; set < place.sets.end; ++set) {
                const Span some = channels(set);
                for (int64_t c = some.begin; c < some.end; ++c)
                    copy_channel(plan, plane_of_x(place.group, c), chunk, scratch,
                                 x_chunk + (c - some.begin) * plan.f.channel);
                RowPrefetch x_ahead;
                if (set + 1 < place.sets.end)
                    x_ahead = prefetch_of_set(place.group, channels(set + 1), chunk);
                else if (!last)
                    x_ahead = prefetch_of_set(place.group, channels(place.sets.begin), next);
                add_set(place, set, chunk, x_chunk, dy_chunk, x_ahead, dy_ahead, totals);
            }
        }
    }
    void add_set(const WeightPlace& place, int64_t set, const Chunk& chunk, const Sum* x_chunk,
                 const Sum* dy_chunk, RowPrefetch& x_ahead, RowPrefetch& dy_ahead, double* totals) const {
        const int64_t images = chunk.images.count();
        const int64_t first = filters(place.tiles.begin).begin;
        const int64_t tiles = plan.columns() * place.tiles.count();
        const int64_t x_lines = divide_up(x_ahead.lines(), tiles);
        const int64_t dy_lines = divide_up(dy_ahead.lines(), tiles * place.sets.count());
        DotTile<Sum> tile;
        tile.filter_step = plan.components * plan.dy_row;
        tile.runs = plan.joined() ? 1 : images;
        tile.x_run = plan.x_image;
        tile.vectors = divide_up(images / tile.runs * chunk.rows.count() * plan.f.row,
                                 Lanes<Sum>::count);
        tile.dy_run = tile.vectors * Lanes<Sum>::count;
        const Span set_channels = channels(set);
        for (int64_t index = 0; index < plan.columns(); ++index) {
            const Column column = plan.column(index);
            const Span some = taps(set_channels, column);
            if (some.count() == 0) continue;
            for (int64_t t = some.begin; t < some.end; ++t)
                tile.tap[t - some.begin] =
                    x_chunk + t / column.taps * plan.f.channel + column.component * plan.f.phase +
                    offset_of(column.component, t % column.taps);
            tile.totals_step = some.count();
            const auto whole = pick_dot_tile<Sum>(kDotFilters, some.count());
            for (int64_t m = place.tiles.begin; m < place.tiles.end; ++m) {
                const Span rows = filters(m);
                x_ahead.issue(x_lines);
                dy_ahead.issue(dy_lines);
                tile.dy = dy_chunk +
                          ((rows.begin - first) * plan.components + column.component) * plan.dy_row;
                tile.totals = totals + slot(place, set, index, m);
                if (rows.count() == kDotFilters)
                    whole(tile);
                else
                    pick_dot_tile<Sum>(rows.count(), some.count())(tile);
            }
        }
    }
    // A chunk's first pixel in a channel's plane, or in a filter's.
    const T* x_at(const WeightPlace& place, int64_t channel, const Chunk& chunk) const {
        return plane_of_x(place.group, channel) + chunk.images.begin * plan.image_of_x() +
               chunk.rows.begin * plan.s.width;
    }
    const T* dy_at(const WeightPlace& place, int64_t filter, const Chunk& chunk) const {
        return plane_of_dy(place.group, filter) + chunk.images.begin * plan.image_of_dy() +
               chunk.rows.begin * plan.s.width;
    }
    // The same without copies. The first sets prefetch dy of chunk `next`, two rows per tile; the
    // first tiles prefetch x of the next set.
    void add_set_in_place(const WeightPlace& place, int64_t set, const Chunk& chunk, const Chunk& next,
                          double* totals) const {
        DotTile<Sum> tile;
        tile.filter_step = plan.s.height * plan.s.width;
        tile.runs = chunk.images.count(), tile.vectors = chunk.rows.count();
        tile.x_run = plan.image_of_x(), tile.dy_run = plan.image_of_dy();
        const Span some = channels(set);
        for (int64_t t = 0; t < some.count(); ++t) tile.tap[t] = x_at(place, some.begin + t, chunk);
        tile.totals_step = some.count();
        const bool ends = set + 1 == place.sets.end;
        const Span later = channels(ends ? place.sets.begin : set + 1);
        const int64_t row = 2 * (set - place.sets.begin);
        for (int64_t m = place.tiles.begin; m < place.tiles.end; ++m) {
            const Span rows = filters(m);
            tile.dy = dy_at(place, rows.begin, chunk);
            for (int64_t i = 0; i < 2; ++i)
                tile.dy_ahead[i] = row + i < rows.count() ? dy_at(place, rows.begin + row + i, next) : tile.dy;
            const int64_t n = m - place.tiles.begin;
            tile.x_ahead = n < later.count() ? x_at(place, later.begin + n, ends ? next : chunk) : tile.dy;
            tile.totals = totals + slot(place, set, 0, m);
            if (row < rows.count() || n < later.count())
                pick_dot_tile<Sum, true>(rows.count(), some.count())(tile);
            else
                pick_dot_tile<Sum>(rows.count(), some.count())(tile);
        }
    }
    // Offset of a channel's tap for output (0, 0), in its component.
    int64_t offset_of(int64_t component, int64_t tap) const {
        const Sweep& s = plan.s;
        if (!plan.winograd) return tap_offset(s, plan.f, tap / s.kernel_w, tap % s.kernel_w);
        const ComponentTap at = plan.component_tap(component, tap);
        const int64_t across = at.column * s.dilate_w;
        const int64_t phase = at.residue * s.stride_w + across % s.stride_w;
        return phase * kComponents * plan.f.phase + at.group * plan.f.row + across / s.stride_w;
    }
    // Adds the totals of all splits to the first one's, and stores them as gradients.
    void put(const WeightPlace& place, double* totals) const {
        const int64_t size = plan.totals();
        for (int64_t split = 1; split < plan.splits; ++split)
            for (int64_t i = 0; i < size; ++i) totals[i] += totals[split * size + i];
        for (int64_t set = place.sets.begin; set < place.sets.end; ++set) {
            const Span set_channels = channels(set);
            for (int64_t column = 0; column < plan.tap_tiles; ++column)
                for (int64_t m = place.tiles.begin; m < place.tiles.end; ++m) {
                    if (plan.winograd)
                        put_transformed(place, set, column, m, totals);
                    else
                        put_tile(place.group, filters(m), set_channels.begin,
                                 taps(set_channels, plan.column(column)),
                                 totals + slot(place, set, column, m));
                }
        }
    }
    // Output transform: totals of a tile's components become gradients of two kernel rows, or three
    // for groups of three.
    void put_transformed(const WeightPlace& place, int64_t set, int64_t column, int64_t m,
                         const double* totals) const {
        const Sweep& s = plan.s;
        const Span rows = filters(m), some = taps(channels(set), plan.column(column));
        const double* of[3];
        for (int64_t component = 0; component < 3; ++component)
            of[component] = totals + slot(place, set, column + component * plan.tap_tiles, m);
        int64_t places[kDotTaps];
        Fourth fourth[kDotTaps];
        for (int64_t n = 0; n < some.count(); ++n) {
            const int64_t c = (some.begin + n) / plan.taps, tap = (some.begin + n) % plan.taps;
            const ComponentTap at = plan.component_tap(0, tap);
            const int64_t row = at.residue + 2 * at.group * s.stride_h;
            places[n] = (channels(set).begin + c) * plan.window() + row * s.kernel_w + at.column;
            fourth[n] = {nullptr, 0};
            if (plan.residue(at.residue).has_third(at.group))
                fourth[n] = fourth_of(place, set, c * plan.last_taps + at.thirds * s.kernel_w + at.column,
                                      m, totals);
        }
        const int64_t count = rows.count() * some.count();
        double sum[3][kDotsOfTile];
        for (int64_t k = 0; k < count; ++k) {
            const Fourth& last = fourth[k % some.count()];
            const double half = (of[1][k] + of[2][k]) / 2;
            sum[0][k] = of[0][k] + half;
            sum[1][k] = (of[1][k] - of[2][k]) / 2;
            sum[2][k] = last.first ? half + last.first[k / some.count() * last.step] : 0;
        }
        const int64_t step = s.group_channels * plan.window();
        T* const first = dw + (place.group * s.group_filters + rows.begin) * step;
        for (int64_t p = 0; p < 3; ++p) {
            const bool finite = all_finite(sum[p], count);
            const double* from = sum[p];
            for (T* line = first + p * s.stride_h * s.kernel_w; from < sum[p] + count; line += step)
                for (int64_t n = 0; n < some.count(); ++n, ++from) {
                    if (p == 2 && !fourth[n].first) continue;
                    T* to = line + places[n];
                    const double total = finite ? *from : book.finite_or_textbook(*from, to);
                    *to = static_cast<T>(accumulate ? *to + total : total);
                }
        }
    }
    // Totals of the fourth component: a tile's first filter, and the step to the next filter.
    struct Fourth {
        const double* first;
        int64_t step;
    };
    // The totals of tap `tap` of a set in the fourth component.
    Fourth fourth_of(const WeightPlace& place, int64_t set, int64_t tap, int64_t m,
                     const double* totals) const {
        const int64_t all = channels(set).count() * plan.last_taps;
        const int64_t tile = ((tap + 1) * plan.last_tiles - 1) / all;
        const Span some = span_of(all, plan.last_tiles, tile);
        return {totals + slot(place, set, 3 * plan.tap_tiles + tile, m) + tap - some.begin,
                some.count()};
    }
    void put_tile(int64_t group, const Span& rows, int64_t channel, const Span& some,
                  double* totals) const {
        const Sweep& s = plan.s;
        const int64_t step = s.group_channels * plan.window(), count = some.count();
        const bool finite = all_finite(totals, rows.count() * count);
        T* to = dw + (group * s.group_filters + rows.begin) * step + channel * plan.window() +
                some.begin;
        for (int64_t m = rows.begin; m < rows.end; ++m, to += step, totals += count) {
            if (!finite) recompute_nonfinite(book, totals, 1, count, to, 1);
            for (int64_t t = 0; t < count; ++t)
                to[t] = static_cast<T>(accumulate ? to[t] + totals[t] : totals[t]);
        }
    }
};

template <class T, class Sum = T>
int backward_weight(const ece408_problem& problem, const T* x, const T* dy, T* dw, bool accumulate,
                    int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, dy, dw, weight_element<T>};
    const WeightPlan plan = plan_weight<T, Sum>(forward_sweep(s));
    const WeightCall<T, Sum> call = {plan, book, x, dy, dw, accumulate};
    const int64_t places = plan.places(), size = plan.totals();
    const int64_t tasks = places * plan.splits;
    const int used_threads = static_cast<int>(tasks < threads ? tasks : threads);
    const bool one = plan.splits == 1;
    const Buffer<double> totals((one ? used_threads : tasks) * size);
    // Zeroed: vectors read beyond the copies, where dy is zero.
    const auto x_chunks = parallel_zeros<Sum>(used_threads, used_threads * call.x_size());
    const Buffer<Sum> dy_chunks(used_threads * call.dy_size()), scratch(used_threads * call.scratch_size());
    if (!totals || !x_chunks || !dy_chunks || !scratch) return ECE408_NO_MEMORY;
    parallel_for(used_threads, tasks, [&](int64_t task, int thread) {
        const WeightPlace place = place_of(plan, task / plan.splits);
        const Span chunks = span_of(plan.chunks(), plan.splits, task % plan.splits);
        double* sums = totals + (one ? thread : task) * size;
        memset(sums, 0, static_cast<size_t>(size) * sizeof(double));
        call.add_chunks(place, chunks, x_chunks + thread * call.x_size(),
                        dy_chunks + thread * call.dy_size(),
                        scratch + thread * call.scratch_size(), sums);
        if (one) call.put(place, sums);
    });
    if (!one)
        parallel_for(used_threads, places, [&](int64_t index, int) {
            call.put(place_of(plan, index), totals + index * plan.splits * size);
        });
    return ECE408_OK;
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(conv_bwd_w_dot) = {
    {nullptr, nullptr, backward_weight<float>},
    {nullptr, nullptr, backward_weight<double>},
    {nullptr, nullptr, backward_weight<float, double>},
};

}  // namespace ece408
