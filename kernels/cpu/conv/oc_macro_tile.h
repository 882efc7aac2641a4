// Macro-tiles of conv_fwd_oc.h: cut into register tiles, packed, summed and stored.
#pragma once

#include "conv/oc_plan.h"

namespace ece408 {
namespace {

// Blocks of filters that share packed pixels, so that the pixels stay in the first-level cache.
constexpr int64_t kBlocksPerMacroTile = 8;

// Offset of pixel n in the padded images, and the number of pixels from there to the end of its
// row, at most to pixel `end`.
template <class T, class Sum>
inline PixelRun OcPlan<T, Sum>::run_of(const Phase& phase, int64_t n, int64_t end) const {
    const int64_t i = n / phase.columns, j = n % phase.columns, left = phase.columns - j;
    const int64_t y = conv.winograd_2d ? conv.first_of(i % phase.rows) : i % phase.rows * conv.step_h;
    return {i / phase.rows * image() + y * row() + j,
            left < end - n ? left : end - n};
}

// Adds a tile of `count` pixels from `n` on; `run` is its first row, or all of it.
template <class T, class Sum>
inline void OcPlan<T, Sum>::add_tile(MacroTile* s, int64_t n, int64_t count,
                                     const PixelRun& run) const {
    const bool has_two = run.count < count;
    s->first[s->tiles] = n - s->begin;
    s->at[s->tiles] = run.at;
    s->in_first[s->tiles] = has_two ? run.count : count;
    s->gap[s->tiles] = has_two ? run_of(s->phase, n + run.count, s->end).at - run.at : 0;
    ++s->tiles;
}

template <class T, class Sum>
inline void OcPlan<T, Sum>::cut(MacroTile* s) const {
    const int64_t both = of_two_rows(s->phase);
    s->tiles = 0;
    for (int64_t n = s->begin, count; n < s->end; n += count) {
        const PixelRun run = run_of(s->phase, n, s->end);
        if (both > 0 && n + both <= s->end) {
            count = both;
            add_tile(s, n, count, run);
            continue;
        }
        count = packs_pixels ? s->pixels() : run.count;
        const int64_t tiles = (count + kOcPixels - 1) / kOcPixels;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t from = count * tile / tiles, after = count * (tile + 1) / tiles;
            add_tile(s, n + from, after - from, {run.at + from, after - from});
        }
    }
    s->first[s->tiles] = s->pixels();
}

// Where the packed pixels of a tile begin for component n.
template <class T, class Sum>
inline int64_t OcPlan<T, Sum>::place(const MacroTile& s, int64_t n, int64_t tile) const {
    if (!conv.winograd_2d) return tile * s.count * kOcPixels;
    const Phase& phase = conv.phase[n];
    return (phase.first_tap * s.tiles + tile * phase.taps) * s.count * kOcPixels +
           n * beyond();
}

template <class T, class Sum>
inline void OcPlan<T, Sum>::pack_macro_tile(const Sum* images, const MacroTile& s,
                                            Sum* factors) const {
    for (int64_t tile = 0; tile < s.tiles; ++tile) {
        PixelRun run[kOcPixels];
        int64_t runs = 0;
        const int64_t end = s.begin + s.first[tile + 1];
        for (int64_t n = s.begin + s.first[tile]; n < end; n += run[runs++].count)
            run[runs] = run_of(s.phase, n, end);
        if (!conv.winograd_2d) {
            (runs == 1   ? pack_pixels<1, Sum>
             : runs == 2 ? pack_pixels<2, Sum>
                         : pack_pixels<0, Sum>)(
                images, offset + conv.group_channels * s.phase.first_tap + s.done, s.count, run,
                runs, factors + place(s, 0, tile));
            continue;
        }
        Sum* to[kComponents2d];
        for (int64_t n = 0; n < kComponents2d; ++n) to[n] = factors + place(s, n, tile);
        (conv.phase[0].taps == 1 ? transform_pixels<true, Sum> : transform_pixels<false, Sum>)(
            conv, images + s.done * channel(), channel(), row(), s.count, run, runs, to);
    }
}

// Adds products to a block's sums [component][pixel][filter]. `weights(n)`: weights of component n.
// `next`: weights to prefetch after these, or null. Each tile prefetches a part of the next
// weights.
template <class T, class Sum>
template <class Weights>
inline void OcPlan<T, Sum>::add_products(const Sum* images, const MacroTile& s, int64_t block,
                                         const Weights& weights, const Sum* next,
                                         const Sum* factors, OutputPrefetch<T> output_prefetch,
                                         Sum* sums) const {
    const int64_t vectors = this->vectors(block), wide = vectors * Lanes<Sum>::count;
    for (int64_t n = 0; n < components(); ++n, sums += block_sums(s.pixels())) {
        const int64_t count = s.count * each(n), all = count * wide;
        const int64_t first = conv.group_channels * phase_of(s, n).first_tap + s.done * each(n);
        const int64_t* const taps = offset + first;
        const Sum* const own = weights(n);
        const Sum* const then = next && n + 1 < components() ? weights(n + 1) : next;
        const int64_t step = (wide + s.tiles - 1) / s.tiles;
        for (int64_t tile = 0; tile < s.tiles; ++tile) {
            const Sum* const pixels =
                packs_pixels ? factors + place(s, n, tile) : images + s.at[tile];
            const int64_t in_first = s.in_first[tile];
            output_prefetch.issue();
            pick_oc_tile<Sum>(vectors, in_first, s.pixels(tile) - in_first, packs_pixels)(
                pixels, packs_pixels ? kOcPixels : s.gap[tile], taps, count, own,
                then ? WeightPrefetch<Sum>{then + all * tile / s.tiles, step} : WeightPrefetch<Sum>{own, 0},
                s.done > 0, sums + s.first[tile] * wide);
        }
    }
}

// Output transform: sums of `count` pairs (or 2x2 tiles) become rows of pixels, first all even
// rows, then the odd ones; along columns a single row.
template <class T, class Sum>
template <bool TwoD>
inline void OcPlan<T, Sum>::transform_sums(const Sum* sums, int64_t step, int64_t count,
                                           int64_t wide, Sum* rows) const {
    using L = Lanes<Sum>;
    constexpr int kAcross = TwoD ? kComponents : 1, kColumns = TwoD ? 2 : 1;
    const int64_t each = (conv.transforms_columns() ? 2 : 1) * wide;
    const int64_t second = conv.along_columns ? wide : count * each;
    // Along columns, the first outputs of `group` pairs are adjacent, then their second outputs.
    const int64_t group = conv.transforms_columns() ? conv.gap_w : count, next = group * wide;
    for (int64_t k = 0; k < count; k += group, rows += each * group - next)
        for (const Sum* const end = sums + next; sums < end; rows += wide)
            for (int64_t v = 0; v < wide; v += L::count, sums += L::count) {
                typename L::Vec half[2][kAcross];
#pragma GCC unroll 4
                for (int t = 0; t < kAcross; ++t) {
                    typename L::Vec z[kComponents];
#pragma GCC unroll 4
                    for (int d = 0; d < kComponents; ++d) z[d] = L::load(sums + (d * kAcross + t) * step);
                    transform_output(z, 1);
                    half[0][t] = z[0], half[1][t] = z[1];
                }
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; ++odd) {
                    if constexpr (TwoD) transform_output(half[odd], 1);
#pragma GCC unroll 2
                    for (int b = 0; b < kColumns; ++b)
                        L::store(rows + odd * second + b * next + v, half[odd][b]);
                }
            }
}

// Lists the runs of outputs of a macro-tile. Adjacent rows are one run.
template <class T, class Sum>
inline void OcPlan<T, Sum>::find_outputs(MacroTile* s) const {
    const Phase& phase = s->phase;
    const int64_t across = conv.transforms_columns() ? 2 : 1, down = conv.transforms_rows() ? 2 : 1;
    const bool whole = !conv.winograd && conv.phases == 1;
    const int64_t columns = whole ? phase.rows * phase.columns : phase.columns;
    const int64_t height = whole ? 1 : phase.rows;
    const int64_t image = conv.groups * conv.group_filters * conv.out_height * conv.out_width;
    for (int64_t n = s->begin, count; n < s->end; n += count) {
        const int64_t i = n / columns, j = n % columns * across;
        count = columns - n % columns < s->end - n ? columns - n % columns : s->end - n;
        for (int64_t odd = 0; odd < down; ++odd) {
            const int64_t row = conv.transforms_rows() ? conv.first_of(i % height) + odd * conv.gap_h
                                              : phase.row + i % height * conv.out_step_h;
            if (row >= conv.out_height) continue;
            // The last pairs of a row may have one pixel, or none.
            const int64_t pixels = count * across, left = conv.out_width - j;
            s->output[s->outputs++] = {
                i / height * image + row * conv.out_width + phase.column + j * conv.out_step_w,
                whole || pixels < left ? pixels : left, (odd * s->pixels() + n - s->begin) * across};
        }
    }
}

// Prefetches the outputs of a block if they are written next.
template <class T, class Sum>
inline OutputPrefetch<T> OcPlan<T, Sum>::prefetch_outputs(const MacroTile& s, int64_t group,
                                                          int64_t block, bool is_next,
                                                          const T* y) const {
    return {s.output, is_next ? s.outputs : 0, y + block_output(group, block),
            conv.out_height * conv.out_width, filters(block), conv.out_step_w, components() * s.tiles};
}

// Stores the sums of a run of pixels as outputs of a block.
template <class T, class Sum>
inline void OcPlan<T, Sum>::write_output(int64_t group, int64_t block, const OutputRun& output,
                                         bool finite, const Epilogue<T>& epilogue, Sum* sums,
                                         T* y) const {
    const int64_t wide = vectors(block) * Lanes<Sum>::count;
    const int64_t plane = conv.out_height * conv.out_width, count = output.count;
    const int64_t at = block_output(group, block) + output.at;
    T* const to = y + at;
    const Epilogue<T> own = epilogue.from(group * conv.group_filters + first(block), at);
    for (int64_t m = 0; m < (finite ? 0 : filters(block)); ++m)
        recompute_nonfinite(book, sums + m, wide, count, to + m * plane, conv.out_step_w);
    apply_epilogue(own, filters(block), wide, count, sums);
    if (conv.out_step_w == 1)
        transpose_store(sums, wide, count, own, to, plane, filters(block));
    else if (conv.out_step_w == 2)
        transpose_store_even(sums, wide, count, own, to, plane, filters(block));
    else
        transpose_store_strided(sums, wide, count, own, to, plane, filters(block), conv.out_step_w);
}

// Stores a block's sums of a macro-tile as outputs. `rows`: room for the output transform.
template <class T, class Sum>
inline void OcPlan<T, Sum>::write_block(const MacroTile& s, int64_t group, int64_t block,
                                        const Epilogue<T>& epilogue, Sum* sums, Sum* rows,
                                        T* y) const {
    const int64_t wide = vectors(block) * Lanes<Sum>::count, pixels = s.pixels();
    if (conv.winograd_2d)
        transform_sums<true>(sums, block_sums(pixels), pixels, wide, rows);
    else if (conv.winograd)
        transform_sums<false>(sums, block_sums(pixels), pixels, wide, rows);
    else
        rows = sums;
    const int64_t all = (conv.winograd_2d ? 4 : conv.winograd ? 2 : 1) * pixels;
    const bool finite = all_finite(rows, all * wide);
    for (int64_t n = 0; n < s.outputs; ++n)
        write_output(group, block, s.output[n], finite, epilogue, rows + s.output[n].from * wide, y);
}

// Computes a macro-tile for some blocks of filters (one if weights are packed per partial sum).
// With Winograd, phase 0 stands for all components.
template <class T, class Sum>
inline void OcPlan<T, Sum>::run_macro_tile(const Sum* images, int64_t group, int64_t first_block,
                                           int64_t end_block, const Phase& phase, int64_t begin,
                                           int64_t end, const Sum* packed,
                                           const Epilogue<T>& epilogue, Sum* scratch, T* y) const {
    Sum* const sums = scratch + factors();
    Sum* const part = sums + this->sums() + transformed();
    MacroTile s(phase, begin, end);
    cut(&s);
    find_outputs(&s);
    const int64_t all = summed(phase), most = most_summed();
    images += group * conv.group_channels * channel();
    do {
        s.count = all - s.done < most ? all - s.done : most;
        if (packs_pixels) pack_macro_tile(images, s, scratch);
        if (packs_parts) pack_part(group * blocks + first_block, s.done, s.count, part);
        for (int64_t block = first_block; block < end_block; ++block) {
            const auto weights_of = [&](int64_t block, int64_t n, int64_t done) -> const Sum* {
                const int64_t first_tap = phase_of(s, n).first_tap;
                const int64_t wide = vectors(block) * Lanes<Sum>::count;
                if (packs_parts) return part + s.count * first_tap * wide;
                return packed + (block - first_block) * this->packed() +
                       (conv.group_channels * first_tap + done * each(n)) * wide;
            };
            const bool ends = s.done + s.count == all, whole = all <= most;
            Sum* const own =
                sums + (whole ? 0 : block - first_block) * components() * block_sums(s.pixels());
            // Behind the last block's weights there may be another block's, or no memory;
            // prefetching the latter does nothing.
            const Sum* const next =
                packs_parts             ? nullptr
                : block + 1 < end_block ? weights_of(block + 1, 0, s.done)
                : ends                  ? packed + (end_block - first_block) * this->packed()
                                        : weights_of(first_block, 0, s.done + s.count);
            add_products(
                images, s, block, [&](int64_t n) { return weights_of(block, n, s.done); }, next,
                scratch, prefetch_outputs(s, group, block, ends && !epilogue.streams, y), own);
            if (ends)
                write_block(s, group, block, epilogue, own, sums + this->sums(), y);
        }
        s.done += s.count;
    } while (s.done < all);
}

// Computes slice `slice` of `slices` of the pixels of `count` images, for some blocks of a group.
template <class T, class Sum>
inline void OcPlan<T, Sum>::run_blocks(const Sum* images, int64_t count, int64_t group,
                                       int64_t first_block, int64_t end_block, int64_t slice,
                                       int64_t slices, const Sum* packed,
                                       const Epilogue<T>& epilogue, Sum* scratch, T* y) const {
    const bool share_pixels = packs_pixels || (ECE408_LANES < 16 && !conv.winograd);
    const int64_t most_blocks = share_pixels ? kBlocksPerMacroTile : 1;
    const int64_t parts = (end_block - first_block + most_blocks - 1) / most_blocks;
    const int64_t blocks = (end_block - first_block + parts - 1) / parts;
    for (int64_t n = 0; n < (conv.winograd ? 1 : conv.phases); ++n) {
        const Phase& phase = conv.phase[n];
        const int64_t pixels = count * phase.rows * phase.columns, grain = this->grain(phase);
        if (pixels == 0) continue;
        const int64_t grains = (pixels + grain - 1) / grain, most = most_pixels(blocks) / grain;
        const int64_t begin = grains * slice / slices, all = grains * (slice + 1) / slices - begin;
        const int64_t macro_tiles = (all + most - 1) / most;
        // If blocks share packed pixels, all blocks of a macro-tile follow each other; else all
        // macro-tiles of a block.
        for (int64_t at = 0; at < macro_tiles * parts; ++at) {
            const int64_t k = share_pixels ? at / parts : at % macro_tiles;
            const int64_t part = share_pixels ? at % parts : at / macro_tiles;
            const int64_t from = (end_block - first_block) * part / parts;
            const int64_t to = (end_block - first_block) * (part + 1) / parts;
            const int64_t end = (begin + all * (k + 1) / macro_tiles) * grain;
            run_macro_tile(images, group, first_block + from, first_block + to, phase,
                           (begin + all * k / macro_tiles) * grain, end < pixels ? end : pixels,
                           packed + from * this->packed(), epilogue, scratch, y);
        }
    }
}

}  // namespace
}  // namespace ece408
