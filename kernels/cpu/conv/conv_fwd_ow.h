// Convolutions as sums of shifted images (flat_image.h), vectorised over output columns: forward
// passes of any convolution, and gradients for x.
//
// A register tile holds a few output channels by a few vectors of pixels. Partial sums have
// kTapBlock taps, because long sums lose more to rounding. Threads take whole images or, if images
// are few, first channels to copy and then macro-tiles of the output.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "conv/flat_image.h"
#include "conv/textbook.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/lanes.h"

namespace ece408 {
namespace {

constexpr int64_t kTapBlock = 256;
// Output pixels of a macro-tile, for one block of channels.
constexpr int64_t kOwMacroTile = 2048;

template <class Sum, int MT, int VT>
__attribute__((noinline)) void sum_tile(const Sum* flat, const int64_t* taps, int64_t count,
                                        const Sum* weight, bool add, Sum* out, int64_t step) {
    using L = Lanes<Sum>;
    typename L::Vec sum[MT][VT] = {};
    for (int64_t t = 0; t < count; ++t) {
        typename L::Vec in[VT];
#pragma GCC unroll 16
        for (int v = 0; v < VT; ++v) in[v] = L::load(flat + taps[t] + v * L::count);
#pragma GCC unroll 16
        for (int m = 0; m < MT; ++m) {
            const typename L::Vec factor = L::broadcast(*weight++);
#pragma GCC unroll 16
            for (int v = 0; v < VT; ++v) sum[m][v] += in[v] * factor;
        }
    }
    for (int m = 0; m < MT; ++m)
        for (int v = 0; v < VT; ++v) {
            Sum* place = out + m * step + v * L::count;
            L::store(place, add ? L::load(place) + sum[m][v] : sum[m][v]);
        }
}

template <class Sum>
using SumTile = void (*)(const Sum*, const int64_t*, int64_t, const Sum*, bool, Sum*, int64_t);

template <class Sum, int MT, int VT>
SumTile<Sum> pick_sum_vectors(int vectors) {
    if constexpr (VT > 1) {
        if (vectors < VT) return pick_sum_vectors<Sum, MT, VT - 1>(vectors);
    }
    return sum_tile<Sum, MT, VT>;
}

template <class Sum, int MT = kTileFilters>
SumTile<Sum> pick_sum_tile(int filters, int vectors) {
    if constexpr (MT > 1) {
        if (filters < MT) return pick_sum_tile<Sum, MT - 1>(filters, vectors);
    }
    return pick_sum_vectors<Sum, MT, kTileVectors>(vectors);
}

// Prepared once per call and shared by its threads.
template <class Sum>
struct SweepPlan {
    Sweep sweep;
    FlatImage flat;
    int64_t blocks;        // of output channels per group
    int64_t rows_at_once;  // output rows of a macro-tile
    int64_t macro_tiles;
    int64_t image_size;    // of a flat image, with room to read past its end
    Buffer<int64_t> taps;  // of a group: offsets in the flat group
    Buffer<Sum> weights;   // [group][block][tap][channel of block]
    Textbook book;         // of the output
};

inline int64_t block_start(int64_t total, int64_t blocks, int64_t block) {
    return total * block / blocks;
}

template <class Sum>
int64_t macro_tile_pixels(const SweepPlan<Sum>& plan) {
    return round_up(plan.rows_at_once * plan.flat.row, kTileVectors * Lanes<Sum>::count);
}

template <class Sum>
int64_t group_taps(const Sweep& s) {
    return s.group_channels * s.kernel_h * s.kernel_w;
}

// `weight_at(group, out channel, in channel, p, q)` returns a weight. False without memory.
template <class Sum, class WeightAt>
bool make_plan(const Sweep& s, WeightAt weight_at, SweepPlan<Sum>* plan) {
    plan->sweep = s;
    plan->flat = flat_image(s);
    plan->blocks = (s.group_filters + kTileFilters - 1) / kTileFilters;
    const int64_t rows = kOwMacroTile / plan->flat.row;
    plan->rows_at_once = rows < 1 ? 1 : rows > s.out_height ? s.out_height : rows;
    plan->macro_tiles = (s.out_height + plan->rows_at_once - 1) / plan->rows_at_once;
    plan->image_size =
        s.groups * s.group_channels * plan->flat.channel + macro_tile_pixels(*plan);
    const int64_t taps = group_taps<Sum>(s);
    const int64_t weights = s.groups * s.group_filters * taps;
    plan->taps = Buffer<int64_t>(taps);
    plan->weights = Buffer<Sum>(weights);
    if (!plan->taps || !plan->weights) return false;
    int64_t* tap = plan->taps;
    for (int64_t c = 0; c < s.group_channels; ++c)
        for (int64_t p = 0; p < s.kernel_h; ++p)
            for (int64_t q = 0; q < s.kernel_w; ++q)
                *tap++ = c * plan->flat.channel + tap_offset(s, plan->flat, p, q);
    Sum* weight = plan->weights;
    for (int64_t g = 0; g < s.groups; ++g)
        for (int64_t block = 0; block < plan->blocks; ++block) {
            const int64_t begin = block_start(s.group_filters, plan->blocks, block);
            const int64_t end = block_start(s.group_filters, plan->blocks, block + 1);
            for (int64_t c = 0; c < s.group_channels; ++c)
                for (int64_t p = 0; p < s.kernel_h; ++p)
                    for (int64_t q = 0; q < s.kernel_w; ++q)
                        for (int64_t m = begin; m < end; ++m) *weight++ = weight_at(g, m, c, p, q);
        }
    return true;
}

// How outputs are stored; kStream: by non-temporal stores.
enum Store { kOverwrite, kAccumulate, kStream };

// Adds an offset to rows of sums, `row` apart, and stores them as adjacent rows of the output.
template <class T, class Sum>
void put_rows(Sum* sums, int64_t row, int64_t rows, int64_t width, Sum offset, Store store, T* to) {
    for (int64_t i = 0; i < rows; ++i, sums += row, to += width) {
        if (store == kAccumulate)
            for (int64_t j = 0; j < width; ++j) to[j] = static_cast<T>(to[j] + (sums[j] + offset));
        else
            for (int64_t j = 0; j < width; ++j) to[j] = static_cast<T>(sums[j] + offset);
    }
}

#if defined(__SSE2__)
// The same by non-temporal stores of whole lines; first closes the gaps between the rows.
inline void stream_rows(float* sums, int64_t row, int64_t rows, int64_t width, float offset,
                        float* to) {
    for (int64_t i = 1; i < rows; ++i)
        memmove(sums + i * width, sums + i * row, static_cast<size_t>(width) * sizeof(float));
    const int64_t count = rows * width, past = reinterpret_cast<uintptr_t>(to) / 4 % 16;
    const __m128 offsets = _mm_set1_ps(offset);
    int64_t k = 0;
    for (; k < count && (past + k) % 16 > 0; ++k) to[k] = sums[k] + offset;
    for (; k + 16 <= count; k += 16)
        for (int64_t i = k; i < k + 16; i += 4)
            _mm_stream_ps(to + i, _mm_add_ps(_mm_loadu_ps(sums + i), offsets));
    for (; k < count; ++k) to[k] = sums[k] + offset;
}

inline void put_rows(float* sums, int64_t row, int64_t rows, int64_t width, float offset,
                     Store store, float* to) {
    if (store == kStream)
        stream_rows(sums, row, rows, width, offset, to);
    else
        put_rows<float, float>(sums, row, rows, width, offset, store, to);
}
#endif

// Computes one block of channels of one macro-tile in `sums` and stores it.
template <class T, class Sum>
void run_macro_tile(const SweepPlan<Sum>& plan, const Sum* image, int64_t group, int64_t block,
                    int64_t macro_tile, const T* bias, Store store, Sum* sums, T* out) {
    const Sweep& s = plan.sweep;
    const int64_t lanes = Lanes<Sum>::count, row = plan.flat.row;
    const int64_t begin = block_start(s.group_filters, plan.blocks, block);
    const int filters = static_cast<int>(block_start(s.group_filters, plan.blocks, block + 1) - begin);
    const int64_t taps = group_taps<Sum>(s), step = macro_tile_pixels(plan);
    const Sum* weights = plan.weights + (group * s.group_filters + begin) * taps;
    const int64_t first_row = macro_tile * plan.rows_at_once;
    int64_t rows = s.out_height - first_row;
    if (rows > plan.rows_at_once) rows = plan.rows_at_once;
    const int64_t vectors = ((rows - 1) * row + s.out_width + lanes - 1) / lanes;
    const Sum* flat = image + group * s.group_channels * plan.flat.channel + first_row * row;
    for (int64_t t = 0; t < taps; t += kTapBlock) {
        const int64_t count = taps - t < kTapBlock ? taps - t : kTapBlock;
        for (int64_t v = 0; v < vectors; v += kTileVectors) {
            const int64_t left = vectors - v;
            const int wide = static_cast<int>(left < kTileVectors ? left : kTileVectors);
            pick_sum_tile<Sum>(filters, wide)(flat + v * lanes, plan.taps + t, count,
                                              weights + t * filters, t > 0, sums + v * lanes, step);
        }
    }
    for (int m = 0; m < filters; ++m) {
        const int64_t channel = group * s.group_filters + begin + m;
        const Sum offset = bias ? bias[channel] : Sum(0);
        T* to = out + (channel * s.out_height + first_row) * s.out_width;
        if (!all_finite(sums + m * step, (rows - 1) * row + s.out_width))
            for (int64_t i = 0; i < rows; ++i)
                recompute_nonfinite(plan.book, sums + m * step + i * row, 1, s.out_width, to + i * s.out_width,
                                    1);
        put_rows(sums + m * step, row, rows, s.out_width, offset, store, to);
    }
}

// The whole convolution; `weight_at` as for `make_plan`. False without memory; then nothing has
// been written.
template <class Sum, class T, class WeightAt>
bool run_sweep(const Sweep& s, WeightAt weight_at, const Textbook& book, const T* source,
               const T* bias, T* out, bool accumulate, int threads) {
    SweepPlan<Sum> plan;
    plan.book = book;
    if (!make_plan(s, weight_at, &plan)) return false;
    const int64_t channels = s.groups * s.group_channels, pixels = s.height * s.width;
    const int64_t out_size = s.groups * s.group_filters * s.out_height * s.out_width;
    const int64_t units = s.groups * plan.blocks * plan.macro_tiles;
    const bool by_image = s.batch >= 2 * threads || threads == 1;
    const bool streams = exceeds_caches(s.batch * out_size * static_cast<int64_t>(sizeof(T)));
    const Store store = accumulate ? kAccumulate : streams ? kStream : kOverwrite;
    const int64_t sums_size = kTileFilters * macro_tile_pixels(plan);
    const int64_t images_at_once = images_per_pass(s.batch, plan.image_size);
    const int64_t images = by_image ? threads : images_at_once;
    const auto zeros =
        parallel_zeros<Sum>(threads, images * plan.image_size + threads * sums_size);
    if (!zeros) return false;
    Sum* const memory = zeros;
    if (by_image) {
        parallel_for_ranges(threads, s.batch, [&](int64_t begin, int64_t end, int thread) {
            Sum* image = memory + thread * plan.image_size;
            Sum* sums = memory + images * plan.image_size + thread * sums_size;
            for (int64_t b = begin; b < end; ++b) {
                for (int64_t c = 0; c < channels; ++c)
                    fill_channel(s, plan.flat, source + (b * channels + c) * pixels,
                                 image + c * plan.flat.channel);
                for (int64_t unit = 0; unit < units; ++unit)
                    run_macro_tile(plan, image, unit / plan.macro_tiles / plan.blocks,
                                   unit / plan.macro_tiles % plan.blocks, unit % plan.macro_tiles, bias,
                                   store, sums, out + b * out_size);
            }
#if defined(__SSE2__)
            if (store == kStream) _mm_sfence();
#endif
        });
    } else {
        for (int64_t first = 0; first < s.batch; first += images_at_once) {
            const int64_t left = s.batch - first, count = left < images_at_once ? left : images_at_once;
            const int64_t parts = channels * s.stride_h;
            parallel_for(threads, count * parts, [&](int64_t at, int) {
                const int64_t b = at / parts, c = at % parts / s.stride_h;
                fill_rows(s, plan.flat, source + ((first + b) * channels + c) * pixels,
                          at % s.stride_h, memory + b * plan.image_size + c * plan.flat.channel);
            });
            parallel_for(threads, count * units, [&](int64_t at, int thread) {
                const int64_t b = at / units, unit = at % units;
                run_macro_tile(plan, memory + b * plan.image_size, unit / plan.macro_tiles / plan.blocks,
                               unit / plan.macro_tiles % plan.blocks, unit % plan.macro_tiles, bias,
                               accumulate ? kAccumulate : kOverwrite,
                               memory + images * plan.image_size + thread * sums_size,
                               out + (first + b) * out_size);
            });
        }
    }
    return true;
}

}  // namespace
}  // namespace ece408
