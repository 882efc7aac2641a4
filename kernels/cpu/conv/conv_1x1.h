// 1x1 convolutions, which are matrix products: filters by channels times channels by pixels.
//
// The first block of filters packs a tile's pixels channel by channel while it computes, so that
// the other blocks read them in order, whatever the plane's size. Pixels that few blocks read are
// not packed. All blocks sum the first 256 channels, then the next ones: the first-level cache
// holds this many channels of a tile.
//
// The work on an image is a list of cells, each one tile of pixels by one block of filters: tile by
// tile for a group of blocks, then for the next group. Threads take whole images or, if images are
// few, ranges of the list. On small images few threads take whole groups: threads with the same
// planes would take cache lines from each other.
//
// Packed weights are in blocks of 8 filters if that divides their number. Planes that are a few
// pixels more than whole vectors then use odd tiles of 49 pixels, whose last pixel has its sums of
// a block in one vector of filters.
//
// Weights that few pixels use are read in place: packing them would take as long as a part of their
// products.
#pragma once

#include <stdint.h>

#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/epilogue.h"
#include "micro/plane.h"
#include "micro/tile.h"

namespace ece408 {
namespace {

// Blocks of filters from which on a tile's pixels are packed.
constexpr int64_t kPackPixelsBlocks = 9;

// Pixels per thread from which on weights are packed for a single call.
constexpr int64_t kPackedPixels = 300;

inline bool is_worth_packing(const Shape& s, int threads) {
    return s.batch * s.out_height * s.out_width >= kPackedPixels * threads;
}

// Limits for threads that take whole groups: pixels of a plane, threads, groups per thread.
constexpr int64_t kGroupsPlane = 400, kGroupsThreads = 4, kGroupsEach = 4;

// Floats of pixels that are prefetched together: they stay in the core's second-level cache.
constexpr int64_t kRunFloats = 1 << 15;

// Channels between two prefetch steps of a block. An Intel core has at most 16 lines in flight;
// prefetching more at once would stall the loads of the sums (64 channels of 56x56 took 1.25 times
// as long). Products of shorter vectors take longer.
constexpr int64_t kPrefetchChannels = kLanes == 16 ? 16 : 64;

// Channels from which on threads that divide an image prefetch its pixels.
constexpr int64_t kPrefetchMinChannels = 64;

// A tile of pixels by consecutive blocks of filters: sums over channels [begin, end). Sums of
// earlier channels are in the outputs' place and are added.
struct Column {
    int64_t blocks, begin, end;
    const float* x;  // vectors of a channel are at `in`, the next channel is `step` floats further on
    const int64_t* in;
    int64_t step;
    float* packed_pixels;  // where to pack the pixels for later blocks, or null
    const float* packed;   // per block: biases (before the first channels), then weights as [c][filter];
    const float* bias;     // or the first filter's bias, may be null,
    const float* weights;  // and unpacked weights, with their steps to the next filter and channel
    int64_t weight_step, channel_step;
    float* y;            // of the first filter
    const int64_t* out;  // offsets of the vectors in it
    int64_t filter_step;
    ece408_epilogue epilogue;  // as in StripArgs
    // Pixels to prefetch: each block takes `ahead_channels` channels that are `ahead_step` floats
    // apart, `ahead_floats` of each.
    const float* ahead;
    int64_t ahead_channels, ahead_floats, ahead_step;
    // The extra pixel of an odd tile, with `odd_step` floats to the next channel; where to pack it;
    // its offset in y.
    const float* odd_pixel;
    int64_t odd_step;
    float* odd_packed;
    int64_t odd_out;
    bool prefetches_weights;  // each block prefetches the next block's unpacked weights
    // Whether this is the first or the last tile that a thread computes with these blocks: each
    // tile prefetches the outputs of the next one.
    bool is_first, is_last;
};

// Adds products over the channels; their weights begin at `weight`. Addresses use few registers and
// few instructions: two threads on one core compete for instruction slots. Calls `prefetch_next`
// before every kPrefetchChannels channels, at first before the remainder, or once if no pixels are
// prefetched.
template <bool Packed, bool PacksPixels, bool Odd, int MT, int VT, class PrefetchNext>
__attribute__((always_inline)) inline void add_channels(const Column& column, const float* weight,
                                                        Vec (&sum)[MT][VT], Vec* sums_of_odd,
                                                        const PrefetchNext& prefetch_next) {
    const int64_t row = Packed ? 0 : column.weight_step;
    const int64_t rows[6] = {0, row, 2 * row, hidden(3 * row), 4 * row, hidden(5 * row)};
    const float* pixel[VT];
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) pixel[v] = column.x + column.in[v];
    int64_t at = 0;
    const int64_t all = (column.end - column.begin) * column.step;
    float* to = column.packed_pixels;
    const float* odd_pixel = column.odd_pixel;
    float* odd_to = column.odd_packed;
    Vec odd_sums = Odd ? *sums_of_odd : Vec{};
    // Behind these are the next block's biases and weights: each channel prefetches one's.
    const int64_t next = MT * (column.end - column.begin + 1);
    const int64_t prefetch_step = column.ahead ? kPrefetchChannels * column.step : all;
    const int64_t rest = all % prefetch_step;
    for (int64_t stop = rest ? rest : prefetch_step; stop <= all; stop += prefetch_step) {
        prefetch_next();
        do {
            if (Packed) prefetch(weight + next);
            Vec x[VT];
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) {
                x[v] = load(pixel[v] + at);
                if (PacksPixels) store(to + v * kLanes, x[v]);
            }
            at += column.step;
            if (PacksPixels) to += VT * kLanes;
            if constexpr (Odd) {
                odd_sums = multiply_add(load(weight), broadcast(*odd_pixel), odd_sums);
                if (PacksPixels) *odd_to++ = *odd_pixel;
                odd_pixel += column.odd_step;
            }
            ECE408_UNROLL
            for (int m = 0; m < MT; ++m) {
                const float* some = m < 6 ? weight : weight + 6 * row;
                const bool by_one = Packed && m >= MT / 2;
                const Vec factor = by_one ? Vec{} : broadcast(Packed ? weight[m] : some[rows[m % 6]]);
                ECE408_UNROLL
                for (int v = 0; v < VT; ++v)
                    sum[m][v] = by_one ? multiply_add_one(x[v], weight + m, sum[m][v])
                                       : multiply_add(x[v], factor, sum[m][v]);
            }
            // hidden: for a step of one GCC would make a second loop, and spill the sums of the
            // first.
            weight += Packed ? MT : hidden(column.channel_step);
        } while (at != stop);
    }
    if (Odd) *sums_of_odd = odd_sums;
}

template <int MT, int VT>
__attribute__((always_inline)) inline void apply_epilogue(const Column& column, int64_t first,
                                                          Vec (&sum)[MT][VT]) {
    const VectorEpilogue epilogue(column.epilogue);
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        const int64_t plane = (first + m) * column.filter_step;
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v)
            sum[m][v] = epilogue(first + m, plane + column.out[v], sum[m][v]);
    }
}

// Stores the sums of an odd tile's extra pixel for kOddFilters filters from the block's filter
// `first` on, to `y` for the first; adds earlier channels' sums and applies the epilogue. Not
// inlined, because its registers would be taken from the other sums.
__attribute__((noinline)) void store_odd_pixel(const Column& column, int64_t first, float* y, Vec sums) {
    const int64_t step = column.filter_step;
    alignas(64) float each[kLanes] = {};
    if (column.begin > 0) {
        for (int m = 0; m < kOddFilters; ++m) each[m] = y[m * step];
        sums = load(each) + sums;
    }
    const ece408_epilogue& epilogue = column.epilogue;
    if (epilogue.factors) {
        const Mask some = lanes_between(0, kOddFilters);
        sums = multiply_add(sums, load_only(some, epilogue.factors + first),
                            load_only(some, epilogue.addends + first));
        if (epilogue.added) {
            const float* const added = epilogue.added + first * step + column.odd_out;
            for (int m = 0; m < kOddFilters; ++m) each[m] = added[m * step];
            sums = load(each) + sums;
        }
        sums = bounded(sums, broadcast(epilogue.lowest), broadcast(epilogue.highest));
    }
    store(each, sums);
    for (int m = 0; m < kOddFilters; ++m) y[m * step] = each[m];
}

// Prefetches the next block's weights: their rows are too short for hardware prefetchers.
template <int MT>
inline void prefetch_weights(const Column& column, int64_t first) {
    const float* row = column.weights + (first + MT) * column.weight_step;
    for (int m = 0; m < MT; ++m, row += column.weight_step)
        for (int64_t c = column.begin; c < column.end; c += kLine) prefetch(row + c);
}

// Prefetches of a column's blocks, step by step: pixels, and the outputs of the next tile, for
// which hardware prefetchers are too late. Blocks of a thread's first tile also prefetch their own
// outputs.
template <int MT, int VT>
struct ColumnPrefetch {
    const Column& column;
    const float* pixels;
    int64_t channels, first_row, end_row, channels_each, rows_each;
    const float* pixels_end = nullptr;
    int64_t row = 0;

    explicit ColumnPrefetch(const Column& column)
        : column(column), pixels(column.ahead), channels(pixels ? column.ahead_channels : 0),
          first_row(column.is_last ? MT : 0), end_row(column.is_first ? 2 * MT : MT) {
        const int64_t prefetch_steps =
            pixels ? divide_up(column.end - column.begin, kPrefetchChannels) : 1;
        channels_each = divide_up(channels, prefetch_steps);
        rows_each = divide_up(end_row - first_row, prefetch_steps);
    }

    void start_block() {
        row = first_row;
        pixels_end = pixels + channels * column.ahead_step;
    }

    // The prefetches of one step; `y`: the block's outputs.
    __attribute__((always_inline)) void prefetch_next(float* const (&y)[VT]) {
        for (int64_t c = 0; c < channels_each && pixels != pixels_end; ++c, pixels += column.ahead_step)
            for (int64_t i = 0; i < column.ahead_floats; i += kLine) prefetch_first_level(pixels + i);
        for (int64_t m = 0; m < rows_each && row < end_row; ++m, ++row) {
            const int64_t at = row < MT ? row * column.filter_step + VT * kLanes
                                        : (row - MT) * column.filter_step;
            for (int v = 0; v < VT; v += kLine / kLanes) prefetch_output(y[v] + at);
        }
    }
};

// Variants that pack pixels are separate functions: in one function GCC spills the sums.
template <bool Packed, bool PacksPixels, bool Odd = false>
struct Columns {
    using Function = void(const Column&);

    template <int MT, int VT>
    __attribute__((always_inline)) static void start(const float* bias, Vec (&sum)[MT][VT]) {
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) sum[m][v] = broadcast(bias[m]);
        }
    }

    template <int MT, int VT>
    __attribute__((always_inline)) static void add_to_sums(float* const (&y)[VT], int64_t filter_step,
                                                           Vec (&sum)[MT][VT]) {
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) sum[m][v] = load(y[v] + m * filter_step) + sum[m][v];
        }
    }

    template <int, int MT, int VT>
    __attribute__((noinline)) static void run(const Column& given) {
        const Column column = given;  // a local copy, which stores to y cannot change
        const float* packed = column.packed;
        ColumnPrefetch<MT, VT> column_prefetch(column);
        float* y[VT];
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) y[v] = column.y + column.out[v];
        for (int64_t first = 0; first < column.blocks * MT; first += MT) {
            column_prefetch.start_block();
            const auto prefetch_next = [&] { column_prefetch.prefetch_next(y); };
            Vec sum[MT][VT];
            const float zeros[Odd ? kLanes : MT] = {};
            const float* bias = Packed ? packed : column.bias ? column.bias + first : zeros;
            start(column.begin == 0 ? bias : zeros, sum);
            Vec odd_sums = Odd ? load(column.begin == 0 ? packed : zeros) : Vec{};
            if constexpr (Packed) {
                if (column.begin == 0) packed += MT;
                add_channels<true, PacksPixels, Odd>(column, packed, sum, &odd_sums, prefetch_next);
                packed += MT * (column.end - column.begin);
            } else {
                if (column.prefetches_weights) prefetch_weights<MT>(column, first);
                const float* const row = column.weights + first * column.weight_step;
                add_channels<false, PacksPixels, false>(column, row + column.begin * column.channel_step,
                                                        sum, nullptr, prefetch_next);
            }
            if (column.begin > 0) add_to_sums(y, column.filter_step, sum);
            // Bounds are read again for each block: keeping them would take registers from the
            // sums.
            if (column.epilogue.factors) apply_epilogue(*hidden(&given), first, sum);
            ECE408_UNROLL
            for (int m = 0; m < MT; ++m) {
                ECE408_UNROLL
                for (int v = 0; v < VT; ++v) {
                    store(y[v], sum[m][v]);
                    y[v] += column.filter_step;
                }
            }
            if constexpr (Odd)
                store_odd_pixel(given, first, given.y + given.odd_out + first * given.filter_step, odd_sums);
        }
    }
};

struct Plan1x1 {
    Layer layer;
    Tiling tiling;
    const float* packed;  // or null
    const float* bias;    // for unpacked weights
    ece408_epilogue epilogue;
    float* y;
    int64_t groups;
    bool by_groups;  // the parts of an image are its groups
    int64_t run;     // tiles whose pixels are prefetched together

    int64_t channels() const { return layer.shape.channels; }
    int64_t plane() const { return layer.shape.height * layer.shape.width; }
    int64_t tile_floats(int64_t planes) const { return planes * (tiling.size + 1) * kLanes; }
    int64_t first_block(int64_t group) const { return part_start(tiling.blocks, groups, group); }

    // The number of groups of an image that threads take whole, with packed pixels; or 0.
    int64_t own_groups(int threads) const {
        const int64_t each = tiling.blocks / (kPackPixelsBlocks * threads);
        const bool own = threads > 1 && threads <= kGroupsThreads && layer.shape.batch == 1 &&
                         tiling.plane <= kGroupsPlane;
        return !own ? 0 : threads * (each < kGroupsEach ? each : kGroupsEach);
    }

    // The first cell of a part of an image. Parts have about the same number of vectors, because
    // cells of narrow tiles take less time.
    int64_t first_cell(int64_t part, int64_t parts) const {
        if (by_groups) return first_block(part) * tiling.tiles;
        int64_t at = part_start(tiling.count * tiling.blocks, parts, part), group = 0;
        while (group + 1 < groups && at >= first_block(group + 1) * tiling.count) ++group;
        const int64_t first = first_block(group), blocks = first_block(group + 1) - first;
        at -= first * tiling.count;
        const int64_t tile = tiling.tile_of(at / blocks);
        const int64_t start = tiling.first_vector(tile), vectors = tiling.first_vector(tile + 1) - start;
        return first * tiling.tiles + tile * blocks + (at - start * blocks) / vectors;
    }
};

// Scratch of a thread: a tile's pixels for a partial sum as [c][vector][lane], or null, and its
// outputs as [filter][vector][lane].
struct Scratch1x1 {
    float *pixels, *outputs;
};

// A tile of an image, for any blocks of filters.
struct Tile1x1 {
    const Plan1x1& plan;
    const float* x;
    Scratch1x1 scratch;
    int64_t first, vectors;
    bool is_odd;
    Column column;

    Tile1x1(const Plan1x1& plan, int64_t tile, const float* x, const Scratch1x1& scratch)
        : plan(plan), x(x), scratch(scratch), first(plan.tiling.first_vector(tile)),
          vectors(plan.tiling.first_vector(tile + 1) - first), is_odd(tile < plan.tiling.odd),
          column() {
        column.weight_step = plan.layer.rotated ? 1 : plan.channels();
        column.channel_step = plan.layer.rotated ? plan.layer.shape.filters : 1;
    }

    // Sets the channels of the partial sum that begins with `begin`.
    void take_channels(int64_t begin, bool packs_pixels) {
        column.begin = begin, column.end = sum_end(plan.layer.shape, begin);
        if (is_odd) {
            const int64_t others = vectors * kLanes * sum_end(plan.layer.shape, 0);
            column.odd_out = plan.tiling.out[first + vectors - 1] + kLanes;
            column.odd_pixel = x + begin * plan.plane() + column.odd_out, column.odd_step = plan.plane();
            column.odd_packed = packs_pixels ? scratch.pixels + others : nullptr;
        }
        column.x = x + begin * plan.plane();
        column.in = &plan.tiling.in[first], column.step = plan.plane();
        column.packed_pixels = packs_pixels ? scratch.pixels : nullptr;
        if (begin == 0) return;
        // Outputs and pixels have been prefetched already.
        column.is_first = false, column.is_last = true, column.ahead = nullptr;
    }

    // `blocks` blocks together prefetch channels [begin, end) of a run of tiles of an image.
    void set_prefetch(const float* image, int64_t tile, int64_t begin, int64_t end, int64_t blocks) {
        const Tiling& tiling = plan.tiling;
        const int64_t vector = tiling.first_vector(tile), stop = tile + plan.run;
        const int64_t last = tiling.first_vector(stop < tiling.tiles ? stop : tiling.tiles);
        column.ahead = image + begin * plan.plane() + tiling.in[vector];
        column.ahead_floats = (last - vector) * kLanes;
        column.ahead_step = plan.plane();
        column.ahead_channels = divide_up(end - begin, blocks);
    }

    // The tiles of a run together prefetch the next run or, at the end of the image, the first run
    // of image `next` unless null. So each channel's pixels are read in long rows, the fastest
    // order for memory.
    void set_prefetch_after(int64_t tile, const float* next, int64_t blocks) {
        const int64_t place = tile % plan.run, start = tile - place;
        const int64_t left = plan.tiling.tiles - start, some = left < plan.run ? left : plan.run;
        const int64_t begin = part_start(plan.channels(), some, place);
        const int64_t end = part_start(plan.channels(), some, place + 1);
        if (left > plan.run)
            set_prefetch(x, start + plan.run, begin, end, blocks);
        else if (next)
            set_prefetch(next, 0, begin, end, blocks);
    }

    template <bool PacksPixels>
    void (*pick(int filters, int wide) const)(const Column&) {
        if constexpr (kLanes == 16) {
            using Family = Columns<true, PacksPixels, true>;
            if (is_odd) return Family::template run<0, kOddFilters, kOddVectors>;
        }
        return plan.packed ? pick_filters<Columns<true, PacksPixels>, 0>(filters, wide)
                           : pick_filters<Columns<false, PacksPixels>, 0>(filters, wide);
    }

    // Computes blocks [begin, end), all of one size, to `y`, the output of the first one.
    void compute(int64_t begin, int64_t end, float* y, const ece408_epilogue& epilogue) {
        if (begin >= end) return;
        const int64_t m = plan.tiling.first_filter(begin);
        const int64_t taps = column.end - column.begin;
        if (plan.packed)
            column.packed = plan.packed + packed_offset(plan.layer.shape, m, column.begin, taps);
        column.bias = plan.bias ? plan.bias + m : nullptr;
        column.weights = plan.layer.weights + m * column.weight_step;
        column.blocks = end - begin;
        column.y = y;
        column.epilogue = epilogue;
        const auto filters = static_cast<int>(plan.tiling.filters_of(begin));
        const auto wide = static_cast<int>(vectors);
        (column.packed_pixels ? pick<true>(filters, wide) : pick<false>(filters, wide))(column);
        if (column.packed_pixels) {
            column.x = column.packed_pixels, column.in = kInScratch, column.step = vectors * kLanes;
            column.packed_pixels = nullptr;
            column.odd_pixel = column.odd_packed, column.odd_step = 1, column.odd_packed = nullptr;
        }
        if (column.ahead) column.ahead += column.ahead_step * column.ahead_channels * column.blocks;
    }

    // Computes blocks [begin, end) to `y`, with `column.filter_step` floats between filters and
    // this epilogue.
    void compute_all(int64_t begin, int64_t end, float* y, const ece408_epilogue& epilogue) {
        const Tiling& tiling = plan.tiling;
        const int64_t large = tiling.large_blocks(), start = tiling.first_filter(begin);
        const bool packs_pixels = scratch.pixels && end - begin > 1;
        const int64_t second = packs_pixels ? begin + 1 : begin;
        const int64_t turn = large < second ? second : large < end ? large : end;
        for (int64_t c = 0; c < plan.channels(); c = column.end) {
            take_channels(c, packs_pixels);
            const auto compute_blocks = [&](int64_t blocks_begin, int64_t blocks_end) {
                const int64_t m = tiling.first_filter(blocks_begin) - start;
                const int64_t at = m * column.filter_step;
                const bool is_last = column.end == plan.channels();
                compute(blocks_begin, blocks_end, y + at,
                        is_last ? epilogue_from(epilogue, m, at) : ece408_epilogue{});
            };
            compute_blocks(begin, second);
            compute_blocks(second, turn);
            compute_blocks(turn, end);
        }
    }

    // Computes blocks [begin, end) of the image whose output is `image_y`. `through_scratch`:
    // vectors may not overwrite their neighbours, so outputs go through scratch.
    void run(int64_t begin, int64_t end, float* image_y, bool through_scratch, bool accumulate) {
        const Tiling& tiling = plan.tiling;
        const int64_t m = tiling.first_filter(begin), filters = tiling.first_filter(end) - m;
        float* const y = image_y + m * tiling.plane;
        const ece408_epilogue epilogue = epilogue_from(plan.epilogue, m, y - plan.y);
        column.out = through_scratch ? kInScratch : &tiling.out[first];
        column.filter_step = through_scratch ? vectors * kLanes : tiling.plane;
        if (!through_scratch) return compute_all(begin, end, y, epilogue);
        compute_all(begin, end, scratch.outputs, {});
        put(tiling, epilogue, scratch.outputs, y, filters, first, first + vectors, accumulate);
    }
};

// Computes cells [begin, end) of an image. `next`: the image that this thread probably reads next,
// or null. `whole`: one thread has the whole image.
void run_cells(const Plan1x1& plan, const float* x, const float* next, float* y, const Scratch1x1& scratch,
               int64_t begin, int64_t end, bool accumulate, bool whole) {
    const Tiling& tiling = plan.tiling;
    int64_t group = 0, known = -1;
    while (begin < end) {
        while (begin >= plan.first_block(group + 1) * tiling.tiles) ++group;
        const int64_t first = plan.first_block(group), blocks = plan.first_block(group + 1) - first;
        const int64_t number = (begin - first * tiling.tiles) / blocks;
        const int64_t block = first + (begin - first * tiling.tiles) % blocks;
        const int64_t left = end - begin, all = first + blocks - block;
        const int64_t last = block + (left < all ? left : all);
        begin += last - block;
        Tile1x1 tile(plan, number, x, scratch);
        tile.column.prefetches_weights = known != group && !plan.layer.rotated;
        tile.column.is_first = known != group;
        tile.column.is_last = number + 1 == tiling.tiles || begin == end;
        known = group;
        const bool of_last_group = first + blocks == tiling.blocks;
        // The parts of a shared image are in caches, some of them other cores'. With few channels
        // the sums would end before prefetched pixels arrive.
        if (whole || (!plan.by_groups && plan.channels() >= kPrefetchMinChannels))
            tile.set_prefetch_after(number, of_last_group ? next : nullptr, last - block);
        // Threads must not both write the lanes that two vectors share; a single thread writes them
        // twice.
        const bool shared = !whole && !plan.by_groups && number == tiling.tiles - 1 && tiling.first > 0;
        tile.run(block, last, y, accumulate || shared, accumulate);
    }
}

// Prefetch distance in pixels while a strided channel is copied: hardware prefetchers do not follow
// rows that are apart.
constexpr int64_t kStridedPrefetch = 1024;

// Copies the pixels of a channel that the strides select.
void pick_channel(const Layer& layer, const float* from, float* to) {
    const int64_t step = layer.stride_w, columns = divide_up(layer.width, step);
    for (int64_t y = 0; y < layer.height; y += layer.stride_h, to += columns) {
        const float* row = from + y * layer.width;
        for (int64_t x = 0; x < layer.width; x += kLine) prefetch_first_level(row + kStridedPrefetch + x);
        if (step == 2)  // the compiler vectorises this step
            for (int64_t x = 0; x < columns; ++x) to[x] = row[2 * x];
        else
            for (int64_t x = 0; x < columns; ++x) to[x] = row[step * x];
    }
}

// The number of groups of blocks. Weights are read from the last-level cache once per tile of a
// group and thread, pixels are packed once per group. A few threads do not saturate that cache.
int64_t count_groups(const Plan1x1& plan, int used_threads) {
    const Shape& s = plan.layer.shape;
    const int64_t weights = s.filters * s.channels, pixels = s.channels * plan.plane();
    const int64_t held_up = s.batch < used_threads ? used_threads / 4 : 0, most = plan.tiling.blocks / 2;
    int64_t groups = 1;
    while (groups < most && 2 * pixels * groups * (groups + 1) < held_up * weights) ++groups;
    return groups;
}

// Copies a channel with its border, or the pixels that the strides select.
void copy_channel(const Layer& layer, const float* from, float* to) {
    if (layer.stride_h > 1 || layer.stride_w > 1)
        pick_channel(layer, from, to);
    else
        pad_channel(layer, from, to);
}

// False without memory.
bool run_conv_1x1(const Layer& layer, const float* x, const float* bias, const float* packed,
                  const ece408_epilogue& epilogue, float* y, bool accumulate, int threads) {
    const Shape& s = layer.shape;
    Plan1x1 plan = {layer, Tiling(s), packed, bias, epilogue, y, 1, false, 1};
    const int64_t odd = packed && !accumulate ? odd_tiles(s, kLanes) : 0;
    const bool made = odd > 0 ? make_odd_tiling(s.out_height * s.out_width, odd, &plan.tiling)
                              : make_tiling(s.out_height, s.out_width, s.width, &plan.tiling);
    if (!made) return false;
    const int64_t all = plan.tiling.all(), own_groups = plan.own_groups(threads);
    plan.by_groups = own_groups > 0;
    const int64_t parts = plan.by_groups ? own_groups : count_parts(s.batch, all, threads);
    const int64_t units = s.batch * parts;
    const int used_threads = static_cast<int>(threads < units ? threads : units);
    const int64_t pixels = layer.height * layer.width, image = s.channels * plan.plane();
    plan.groups = plan.by_groups ? own_groups : count_groups(plan, used_threads);
    while (2 * plan.run * plan.tile_floats(s.channels) <= kRunFloats) plan.run *= 2;
    const bool packs_pixels = plan.tiling.blocks >= kPackPixelsBlocks * plan.groups;
    const bool copies = !layer.as_it_is();
    const bool through_scratch = accumulate || (parts > 1 && !plan.by_groups && plan.tiling.first > 0);
    const int64_t for_pixels = packs_pixels ? plan.tile_floats(sum_end(s, 0)) : 0;
    const int64_t for_one = for_pixels + (through_scratch ? plan.tile_floats(s.filters) : 0);
    Buffer<float> scratches, copied;
    if (for_one > 0) scratches = Buffer<float>(used_threads * for_one);
    if (copies) copied = Buffer<float>((parts == 1 ? used_threads : s.batch) * image);
    if ((for_one > 0 && !scratches) || (copies && !copied)) return false;
    const auto scratch_of = [&](int thread) {
        float* const own = scratches + thread * for_one;
        return Scratch1x1{packs_pixels ? own : nullptr, through_scratch ? own + for_pixels : nullptr};
    };
    const auto copy = [&](int64_t b, int64_t c, float* to) {
        copy_channel(layer, x + (b * s.channels + c) * pixels, to + c * plan.plane());
    };
    if (copies && parts > 1)
        parallel_for(used_threads, s.batch * s.channels, [&](int64_t number, int) {
            const int64_t b = number / s.channels;
            copy(b, number % s.channels, copied + b * image);
        });
    parallel_for_ranges(used_threads, units, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t unit = begin, after; unit < end; unit = after) {
            const int64_t b = unit / parts, part = unit % parts;
            after = end < (b + 1) * parts ? end : (b + 1) * parts;
            const float* from = x + b * s.channels * pixels;
            const bool more = !copies && parts == 1 && after < end;
            const float* const next = more ? from + image : nullptr;
            if (copies) {
                float* const own = copied + (parts == 1 ? thread : b) * image;
                for (int64_t c = 0; c < s.channels && parts == 1; ++c) copy(b, c, own);
                from = own;
            }
            run_cells(plan, from, next, y + b * s.filters * plan.tiling.plane, scratch_of(thread),
                      plan.first_cell(part, parts), plan.first_cell(after - b * parts, parts), accumulate,
                      parts == 1);
        }
    });
    return true;
}

}  // namespace
}  // namespace ece408
