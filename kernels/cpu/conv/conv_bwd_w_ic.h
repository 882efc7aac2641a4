// The gradient for w, vectorised over input channels; dy is broadcast.
//
// A register tile holds a tap's gradients for a few filters by one or two vectors of channels,
// summed over pixels. Images are transposed first, so that the channels of a pixel are adjacent.
// Then a tap is an offset and a stride a longer step: no kernel, stride or dilation multiplies
// borders, and no lanes are added up. This pays with enough channels to fill vectors, and enough
// filters for the transposition of x, and vice versa.
//
// Pixels are processed in chunks, small enough for partial sums in float, which are added to totals
// in double. A task is a block of channels by some tiles of filters over one split of the chunks
// (split-K). The order of sums does not depend on the number of threads, and splits are added up in
// order.
#pragma once

#include "conv/flat_image.h"
#include "conv/oc_tile.h"
#include "conv/textbook.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/interleave.h"
#include "micro/row_copy.h"

namespace ece408 {
namespace {

// The number of tasks wanted, and the most bytes of totals of several splits.
constexpr int64_t kIcTasks = 64, kIcSplitBytes = 4 << 20;

// Elements of x and dy that are transposed before products begin: they stay in the caches of up to
// kScalingThreads threads. More threads transpose more if that does not change the order of sums,
// but less than 32 MiB: the allocator returns larger buffers to the system after each call.
constexpr int64_t kElementsAtOnce = 1 << 20, kScalingThreads = 4, kMostElementsAtOnce = 7 << 20;

struct Range {
    int64_t begin, end;

    int64_t count() const { return end - begin; }
};

inline Range part_of(int64_t total, int64_t parts, int64_t part) {
    return {total * part / parts, total * (part + 1) / parts};
}

// Some columns of some rows of dy of some images.
struct PixelChunk {
    Range images, rows, columns;
};

struct ChannelPlan {
    Sweep s;                                       // the transposed images; a 1x1 kernel has one row without stride
    bool picks;                                    // strides select fewer pixels than x has
    int64_t lanes;                                 // of a vector
    int64_t blocks;                                // of channels per group, two vectors each
    int64_t tiles, tall;                           // of filters per group, and the most filters of one
    int64_t tile_parts;                            // parts of the tiles; a task has one
    int64_t image_parts, row_parts, column_parts;  // the chunks
    int64_t splits;
    int64_t images_at_once;  // images that are transposed at a time

    int64_t window() const { return s.kernel_h * s.kernel_w; }
    int64_t pixels() const { return s.height * s.width; }
    int64_t out_pixels() const { return s.out_height * s.out_width; }
    int64_t wide() const { return kOcVectors * lanes; }
    int64_t channels(int64_t block) const {
        const int64_t left = s.group_channels - block * wide();
        return left < wide() ? left : wide();
    }
    int64_t vectors(int64_t block) const { return divide_up(channels(block), lanes); }
    // Elements of an image's x and dy, and steps from block to block and from tile to tile.
    int64_t x_block() const { return pixels() * wide(); }
    int64_t dy_tile() const { return out_pixels() * tall; }
    int64_t x_image() const { return s.groups * blocks * x_block(); }
    int64_t dy_image() const { return s.groups * tiles * dy_tile(); }

    Range filters(int64_t tile) const { return part_of(s.group_filters, tiles, tile); }
    int64_t chunks() const { return image_parts * row_parts * column_parts; }
    // A chunk of `images` images that are transposed together.
    PixelChunk chunk(int64_t index, int64_t images) const {
        const int64_t column = index % column_parts, row = index / column_parts % row_parts;
        return {part_of(images, image_parts, index / column_parts / row_parts),
                part_of(s.out_height, row_parts, row), part_of(s.out_width, column_parts, column)};
    }
    int64_t places() const { return s.groups * blocks * tile_parts; }
    // Totals of a tile's taps, and of a task.
    int64_t tile_totals() const { return window() * tall * wide(); }
    int64_t totals() const { return divide_up(tiles, tile_parts) * tile_totals(); }
};

template <class Sum>
ChannelPlan plan_channels(const Sweep& s, int threads) {
    ChannelPlan plan = {};
    plan.s = s;
    plan.lanes = Lanes<Sum>::count;
    plan.picks = is_flat(s) && (s.out_height < s.height || s.out_width < s.width);
    if (is_flat(s)) {
        plan.s.width = plan.s.out_width = s.out_height * s.out_width;
        plan.s.height = plan.s.out_height = plan.s.stride_h = plan.s.stride_w = 1;
    }
    plan.blocks = divide_up(s.group_channels, plan.wide());
    plan.tiles = divide_up(s.group_filters, kOcPixels);
    plan.tall = divide_up(s.group_filters, plan.tiles);
    plan.column_parts = divide_up(plan.s.out_width, kSumBlock);
    const int64_t rows = kSumBlock / divide_up(plan.s.out_width, plan.column_parts);
    plan.row_parts = divide_up(plan.s.out_height, rows);
    const bool whole = plan.column_parts == 1 && plan.row_parts == 1;
    const int64_t images = whole ? kSumBlock / plan.out_pixels() : 1;
    plan.tile_parts = divide_up(kIcTasks, s.groups * plan.blocks);
    if (plan.tile_parts > plan.tiles) plan.tile_parts = plan.tiles;
    // If a task has all chunks of an image, the order of its sums does not depend on the number of
    // images.
    const bool scales = !whole && plan.places() >= kIcTasks && threads > kScalingThreads;
    const int64_t many = kElementsAtOnce * threads / 2;
    const int64_t numbers = !scales ? kElementsAtOnce : many < kMostElementsAtOnce ? many : kMostElementsAtOnce;
    const int64_t most = numbers / (plan.x_image() + plan.dy_image());
    plan.images_at_once = most < 1 ? 1 : most < s.batch ? most : s.batch;
    if (scales) plan.images_at_once = divide_up(s.batch, divide_up(s.batch, plan.images_at_once));
    plan.image_parts = divide_up(plan.images_at_once, images);
    const int64_t bytes = plan.places() * plan.totals() * static_cast<int64_t>(sizeof(double));
    plan.splits = divide_up(kIcTasks, plan.places());
    if (plan.splits > kIcSplitBytes / bytes) plan.splits = kIcSplitBytes / bytes;
    if (plan.splits > plan.chunks()) plan.splits = plan.chunks();
    if (plan.splits < 1) plan.splits = 1;
    return plan;
}

// Pixels of x and dy for a tile: runs of `columns` in `rows` of `images`.
template <class Sum>
struct ChannelTile {
    const Sum* x;
    const Sum* dy;
    int64_t images, rows, columns;
    int64_t x_image, x_row, x_step;  // steps in elements
    int64_t dy_image, dy_row, dy_step;
    double* totals;  // [filter][channel]; sums are added
};

template <class Sum, int MV, int P>
__attribute__((noinline)) void channel_tile(const ChannelTile<Sum>& tile) {
    using L = Lanes<Sum>;
    typename L::Vec sum[P][MV] = {};
    const int64_t x_step = tile.x_step, dy_step = tile.dy_step;
    for (int64_t b = 0; b < tile.images; ++b)
        for (int64_t i = 0; i < tile.rows; ++i) {
            const Sum* x = tile.x + b * tile.x_image + i * tile.x_row;
            const Sum* dy = tile.dy + b * tile.dy_image + i * tile.dy_row;
            for (int64_t j = 0; j < tile.columns; ++j, x += x_step, dy += dy_step) {
                typename L::Vec in[MV];
#pragma GCC unroll 2
                for (int v = 0; v < MV; ++v) in[v] = L::load(x + v * L::count);
#pragma GCC unroll 16
                for (int p = 0; p < P; ++p) {
                    const bool by_one = p >= P / 2;
                    const typename L::Vec factor = by_one ? typename L::Vec{} : L::broadcast(dy[p]);
#pragma GCC unroll 2
                    for (int v = 0; v < MV; ++v)
                        sum[p][v] = by_one ? add_one(in[v], dy + p, sum[p][v]) : sum[p][v] + in[v] * factor;
                }
            }
        }
    Sum each[P * MV * L::count];
#pragma GCC unroll 16
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < MV; ++v) L::store(each + (p * MV + v) * L::count, sum[p][v]);
    for (int64_t k = 0; k < P * MV * L::count; ++k) tile.totals[k] += each[k];
}

template <class Sum>
using RunChannelTile = void (*)(const ChannelTile<Sum>&);

template <class Sum, int MV, int P = kOcPixels>
RunChannelTile<Sum> pick_channel_tile(int64_t filters) {
    if constexpr (P > 1) {
        if (filters < P) return pick_channel_tile<Sum, MV, P - 1>(filters);
    }
    return channel_tile<Sum, MV, P>;
}

// The outputs of a range whose tap is inside the image; `at`: its position for output 0.
inline Range inside_of(const Range& outputs, int64_t at, int64_t stride, int64_t size) {
    const int64_t begin = at < 0 ? divide_up(-at, stride) : 0;
    const int64_t end = at < size ? divide_up(size - at, stride) : 0;
    return {begin > outputs.begin ? begin : outputs.begin, end < outputs.end ? end : outputs.end};
}

template <class T, class Sum>
struct ChannelCall {
    const ChannelPlan& plan;
    const Shape& image;  // the problem
    const Textbook& book;
    const T* x;
    const T* dy;
    T* dw;
    bool accumulate;
    Sum* images;  // [image][group][block][pixel][channel]
    Sum* tiles;   // [image][group][tile][pixel][filter]

    // Transposes block `index` of image `b` of this pass, which is image `from` of the batch.
    void transpose_block(int64_t b, int64_t from, int64_t index, Sum* scratch) const {
        const int64_t group = index / plan.blocks, block = index % plan.blocks;
        const int64_t wide = plan.vectors(block) * plan.lanes, plane = image.height * image.width;
        const int64_t first = group * image.group_channels + block * plan.wide();
        const T* source = x + (from * image.channels + first) * plane;
        Sum* out = images + b * plan.x_image() + index * plan.x_block();
        if (!plan.picks) {
            interleave(source, plane, plan.channels(block), wide, plan.pixels(), out);
            return;
        }
        const int64_t columns = image.out_width, step = round_up(columns, plan.lanes);
        const RowCopy<T, Sum> pick = {{image.stride_w, 0, columns, columns}};
        for (int64_t i = 0; i < image.out_height; ++i, out += columns * wide) {
            const T* row = source + i * image.stride_h * image.width;
            for (int64_t c = 0; c < plan.channels(block); ++c) pick(row + c * plane, scratch + c * step);
            interleave(scratch, step, plan.channels(block), wide, columns, out);
        }
    }
    void transpose_tile(int64_t b, int64_t from, int64_t index) const {
        const int64_t plane = plan.out_pixels();
        const Range some = plan.filters(index % plan.tiles);
        const int64_t first = index / plan.tiles * image.group_filters + some.begin;
        interleave(dy + (from * image.filters + first) * plane, plane, some.count(), plan.tall, plane,
                   tiles + b * plan.dy_image() + index * plan.dy_tile());
    }
    // Elements per thread for rows that strides select from.
    int64_t scratch() const {
        return plan.picks ? plan.wide() * round_up(image.out_width, plan.lanes) : 0;
    }

    Range tiles_of(int64_t place) const {
        return part_of(plan.tiles, plan.tile_parts, place % plan.tile_parts);
    }
    // Adds the products of chunks of `count` images to the totals of a place.
    void add_chunks(int64_t place, const Range& chunks, int64_t count, double* totals) const {
        const int64_t at = place / plan.tile_parts, group = at / plan.blocks, block = at % plan.blocks;
        const int64_t wide = plan.vectors(block) * plan.lanes;
        const Range some = tiles_of(place);
        for (int64_t index = chunks.begin; index < chunks.end; ++index) {
            const PixelChunk chunk = plan.chunk(index, count);
            const Sum* source = images + chunk.images.begin * plan.x_image() + at * plan.x_block();
            double* to = totals;
            for (int64_t tile = some.begin; tile < some.end; ++tile, to += plan.tile_totals()) {
                const int64_t filters = plan.filters(tile).count();
                const auto run = plan.vectors(block) == 1 ? pick_channel_tile<Sum, 1>(filters)
                                                          : pick_channel_tile<Sum, 2>(filters);
                const Sum* factors = tiles + chunk.images.begin * plan.dy_image() +
                                     (group * plan.tiles + tile) * plan.dy_tile();
                for (int64_t tap = 0; tap < plan.window(); ++tap)
                    add_tap(chunk, tap, source, factors, wide, run, to + tap * plan.tall * wide);
            }
        }
    }
    void add_tap(const PixelChunk& chunk, int64_t tap, const Sum* source, const Sum* factors,
                 int64_t wide, RunChannelTile<Sum> run, double* totals) const {
        const Sweep& s = plan.s;
        const int64_t down = tap / s.kernel_w * s.dilate_h - s.pad_h;
        const int64_t across = tap % s.kernel_w * s.dilate_w - s.pad_w;
        const Range rows = inside_of(chunk.rows, down, s.stride_h, s.height);
        const Range columns = inside_of(chunk.columns, across, s.stride_w, s.width);
        if (rows.count() <= 0 || columns.count() <= 0) return;
        ChannelTile<Sum> tile;
        const int64_t row = rows.begin * s.stride_h + down;
        const int64_t column = columns.begin * s.stride_w + across;
        tile.x = source + (row * s.width + column) * wide;
        tile.dy = factors + (rows.begin * s.out_width + columns.begin) * plan.tall;
        tile.images = chunk.images.count(), tile.rows = rows.count(), tile.columns = columns.count();
        tile.x_image = plan.x_image(), tile.dy_image = plan.dy_image();
        tile.x_row = s.stride_h * s.width * wide, tile.dy_row = s.out_width * plan.tall;
        tile.x_step = s.stride_w * wide, tile.dy_step = plan.tall;
        tile.totals = totals;
        run(tile);
    }
    // Stores totals as gradients.
    void put(int64_t place, double* totals) const {
        const int64_t at = place / plan.tile_parts, group = at / plan.blocks, block = at % plan.blocks;
        const int64_t wide = plan.vectors(block) * plan.lanes, window = plan.window();
        const int64_t channels = plan.channels(block), step = plan.tall * wide;
        const Range some = tiles_of(place);
        for (int64_t tile = some.begin; tile < some.end; ++tile, totals += plan.tile_totals()) {
            const Range rows = plan.filters(tile);
            const bool finite = all_finite(totals, window * step);
            for (int64_t m = rows.begin; m < rows.end; ++m)
                for (int64_t tap = 0; tap < window; ++tap) {
                    double* from = totals + tap * step + (m - rows.begin) * wide;
                    const int64_t filter = group * image.group_filters + m;
                    T* to = dw + (filter * image.group_channels + block * plan.wide()) * window + tap;
                    if (!finite) recompute_nonfinite(book, from, 1, channels, to, window);
                    if (window == 1)
                        put_line<1>(from, channels, 1, to);
                    else
                        put_line<0>(from, channels, window, to);
                }
        }
    }
    // STEP: a constant step, which the compiler vectorises, or 0.
    template <int STEP>
    void put_line(const double* from, int64_t count, int64_t step, T* to) const {
        const int64_t next = STEP ? STEP : step;
        if (accumulate)
            for (int64_t c = 0; c < count; ++c)
                to[c * next] = static_cast<T>(to[c * next] + from[c]);
        else
            for (int64_t c = 0; c < count; ++c) to[c * next] = static_cast<T>(from[c]);
    }
};

// False without memory; then nothing has been written.
template <class Sum, class T>
bool run_bwd_w_ic(const Shape& shape, const Textbook& book, const T* x, const T* dy, T* dw,
                  bool accumulate, int threads) {
    const ChannelPlan plan = plan_channels<Sum>(forward_sweep(shape), threads);
    ChannelCall<T, Sum> call = {plan, shape, book, x, dy, dw, accumulate, nullptr, nullptr};
    const int64_t places = plan.places(), tasks = places * plan.splits, size = plan.totals();
    const bool one = plan.splits == 1 && plan.images_at_once == shape.batch;
    const Buffer<double> totals((one ? threads : tasks) * size);
    const int64_t x_size = plan.images_at_once * plan.x_image();
    const int64_t dy_size = plan.images_at_once * plan.dy_image();
    const Buffer<Sum> memory(x_size + dy_size + threads * call.scratch());
    if (!totals || !memory) return false;
    call.images = memory;
    call.tiles = memory + x_size;
    Sum* const scratch = call.tiles + dy_size;
    const int64_t blocks = shape.groups * plan.blocks, tiles = shape.groups * plan.tiles;
    for (int64_t first = 0; first < shape.batch; first += plan.images_at_once) {
        const int64_t left = shape.batch - first;
        const int64_t count = left < plan.images_at_once ? left : plan.images_at_once;
        parallel_for(threads, count * (blocks + tiles), [&](int64_t index, int thread) {
            const int64_t b = index / (blocks + tiles), at = index % (blocks + tiles);
            if (at < blocks)
                call.transpose_block(b, first + b, at, scratch + thread * call.scratch());
            else
                call.transpose_tile(b, first + b, at - blocks);
        });
        parallel_for(threads, tasks, [&](int64_t task, int thread) {
            const int64_t place = task / plan.splits;
            double* sums = totals + (one ? thread : task) * size;
            if (first == 0) memset(sums, 0, static_cast<size_t>(size) * sizeof(double));
            call.add_chunks(place, part_of(plan.chunks(), plan.splits, task % plan.splits), count,
                            sums);
            if (one) call.put(place, sums);
        });
    }
    if (one) return true;
    parallel_for(threads, places, [&](int64_t place, int) {
        double* sums = totals + place * plan.splits * size;
        for (int64_t split = 1; split < plan.splits; ++split)
            for (int64_t i = 0; i < size; ++i) sums[i] += sums[split * size + i];
        call.put(place, sums);
    });
    return true;
}

}  // namespace
}  // namespace ece408
