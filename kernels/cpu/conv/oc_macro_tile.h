// Macro-tiles of conv_fwd_oc.h.
#pragma once

#include "conv/oc_plan.h"

namespace ece408 {
namespace {

// A pixel's place in the padded images, and how many of its row follow up to pixel `end`.
template <class T, class Sum>
inline DeepRun DeepPlan<T, Sum>::run_of(const Phase& phase, int64_t n, int64_t end) const {
    const int64_t i = n / phase.columns, j = n % phase.columns, left = phase.columns - j;
    const int64_t y = deep.by_squares ? deep.first_of(i % phase.rows) : i % phase.rows * deep.step_h;
    return {i / phase.rows * image() + y * row() + j,
            left < end - n ? left : end - n};
}

// Pixels from `n` on, of which `run` has the first row, or all.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::add_tile(Stretch* s, int64_t n, int64_t count, const DeepRun& run) const {
    const bool has_two = run.count < count;
    s->first[s->tiles] = n - s->begin;
    s->at[s->tiles] = run.at;
    s->in_first[s->tiles] = has_two ? run.count : count;
    s->apart[s->tiles] = has_two ? run_of(s->phase, n + run.count, s->end).at - run.at : 0;
    ++s->tiles;
}

template <class T, class Sum>
inline void DeepPlan<T, Sum>::cut(Stretch* s) const {
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

// Where its factors of a tile begin.
template <class T, class Sum>
inline int64_t DeepPlan<T, Sum>::place(const Stretch& s, int64_t n, int64_t tile) const {
    if (!deep.by_squares) return tile * s.count * kDeepPixels;
    const Phase& phase = deep.phase[n];
    return (phase.first_tap * s.tiles + tile * phase.taps) * s.count * kDeepPixels +
           n * beyond();
}

template <class T, class Sum>
inline void DeepPlan<T, Sum>::lay_out(const Sum* images, const Stretch& s, Sum* factors) const {
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

// Adds products to a block's sums, as [domain][pixel][filter]. `weights(n)`: domain n's. `next`: what
// is read after them, or null. Of this, and of the next domain's, each tile asks for a share.
template <class T, class Sum>
template <class Weights>
inline void DeepPlan<T, Sum>::add_products(const Sum* images, const Stretch& s, int64_t block,
                                        const Weights& weights, const Sum* next, const Sum* factors,
                                        DeepAsked<T> asked, Sum* sums) const {
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
template <class T, class Sum>
template <bool Squares>
inline void DeepPlan<T, Sum>::join(const Sum* sums, int64_t step, int64_t count, int64_t wide,
                                   Sum* rows) const {
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

// Where a stretch's outputs lie. RowRange that follow each other are one.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::find_outputs(Stretch* s) const {
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

// Those of a block, if they are the next that are written.
template <class T, class Sum>
inline DeepAsked<T> DeepPlan<T, Sum>::asked_outputs(const Stretch& s, int64_t group, int64_t block,
                                        bool is_asked, const T* y) const {
    return {s.output, is_asked ? s.outputs : 0, y + block_output(group, block),
            deep.out_height * deep.out_width, filters(block), deep.out_step_w, domains() * s.tiles};
}

// Sums of pixels of a row become a block's outputs.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::write_output(int64_t group, int64_t block, const DeepOutput& output, bool finite,
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
template <class T, class Sum>
inline void DeepPlan<T, Sum>::write_block(const Stretch& s, int64_t group, int64_t block, const DeepEnd<T>& end,
                                        Sum* sums, Sum* rows, T* y) const {
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
template <class T, class Sum>
inline void DeepPlan<T, Sum>::run_stretch(const Sum* images, int64_t group, int64_t first_block,
                                        int64_t end_block, const Phase& phase, int64_t begin, int64_t end,
                                        const Sum* packed, const DeepEnd<T>& last, Sum* scratch, T* y) const {
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
template <class T, class Sum>
inline void DeepPlan<T, Sum>::run_blocks(const Sum* images, int64_t count, int64_t group, int64_t first_block,
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

}  // namespace
}  // namespace ece408
