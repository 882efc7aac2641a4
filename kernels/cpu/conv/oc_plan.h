// Plan of a call of conv_fwd_oc.h.
#pragma once

#include "conv/oc_epilogue.h"
#include "conv/oc_f23_rows.h"
#include "conv/oc_geometry.h"
#include "conv/oc_tile.h"
#include "conv/textbook.h"
#include "micro/row_copy.h"

namespace ece408 {
namespace {

// Where the weight for filter m (a lane) and channel c of a group lies: first + group * group_step
// + m * filter_step + c * channel_step + p * (the kernel's width) + q.
template <class T>
struct DeepWeights {
    const T* first;
    int64_t group_step, filter_step, channel_step;
};

// Whether the output is written past the caches: only whole lines can be.
template <class T>
bool streams_output(const Deep& deep, const DeepEnd<T>& end) {
    const int64_t outputs = deep.batch * deep.groups * deep.group_filters * deep.out_height * deep.out_width;
    return ECE408_STREAMS && !end.accumulate && !end.finish.added && deep.out_width % kLanes == 0 &&
           exceeds_caches(outputs * static_cast<int64_t>(sizeof(T)));
}

// Rows of the padded source, or of each domain of pairs.
struct RowRange {
    int64_t begin, end;
};

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

    // A tap's place, with the kernel turned round or not.
    int64_t tap_place(int64_t tap, int64_t kernel) const {
        return deep.direction < 0 ? kernel - 1 - tap : tap;
    }

    // Domain n's phase, and its taps for each of the terms of a sum.
    const Phase& phase_of(const Stretch& s, int64_t n) const {
        return deep.by_pairs ? deep.phase[n] : s.phase;
    }
    int64_t each(int64_t n) const { return deep.by_pairs ? deep.phase[n].taps : 1; }

    int64_t block_sums(int64_t pixels) const { return pixels * kDeepVectors * Lanes<Sum>::count; }

    // The first output of a block's first filter, of the first image.
    int64_t block_output(int64_t group, int64_t block) const {
        return (group * deep.group_filters + first(block)) * deep.out_height * deep.out_width;
    }

    // In oc_weights.h.
    const T* first_weight(int64_t unit) const;
    void pack(int64_t unit, Sum* out) const;
    void pack_part(int64_t unit, int64_t done, int64_t count, Sum* out) const;
    void pack_pairs(int64_t block, const T* first, int64_t channels, Sum* out) const;
    void combine_taps(int64_t c, int64_t channels, const Sum* taps, int64_t wide, Sum* out) const;
    void combine_row(int64_t c, int64_t channels, int64_t n, int t, const Sum* columns, int64_t wide,
                     Sum* out) const;

    // In oc_rows.h.
    void ask_for(const T* source, int64_t first, int64_t rows) const;
    void transform(const T* source, int64_t begin, int64_t end, Sum* out) const;
    RowRange all_rows() const;
    RowRange rows_of(int64_t begin, int64_t end) const;
    void pad(const T* source, const RowRange& rows, Sum* out) const;
    void pad_spread(const T* source, Sum* out) const;
    RowShape row_shape(int64_t n) const;

    // In oc_macro_tile.h.
    DeepRun run_of(const Phase& phase, int64_t n, int64_t end) const;
    void add_tile(Stretch* s, int64_t n, int64_t count, const DeepRun& run) const;
    void cut(Stretch* s) const;
    int64_t place(const Stretch& s, int64_t n, int64_t tile) const;
    void lay_out(const Sum* images, const Stretch& s, Sum* factors) const;
    template <class Weights>
    void add_products(const Sum* images, const Stretch& s, int64_t block, const Weights& weights,
                      const Sum* next, const Sum* factors, DeepAsked<T> asked, Sum* sums) const;
    template <bool Squares>
    void join(const Sum* sums, int64_t step, int64_t count, int64_t wide, Sum* rows) const;
    void find_outputs(Stretch* s) const;
    DeepAsked<T> asked_outputs(const Stretch& s, int64_t group, int64_t block, bool is_asked, const T* y) const;
    void write_output(int64_t group, int64_t block, const DeepOutput& output, bool finite,
                      const DeepEnd<T>& end, Sum* sums, T* y) const;
    void write_block(const Stretch& s, int64_t group, int64_t block, const DeepEnd<T>& end, Sum* sums,
                     Sum* rows, T* y) const;
    void run_stretch(const Sum* images, int64_t group, int64_t first_block, int64_t end_block,
                     const Phase& phase, int64_t begin, int64_t end, const Sum* packed,
                     const DeepEnd<T>& last, Sum* scratch, T* y) const;
    void run_blocks(const Sum* images, int64_t count, int64_t group, int64_t first_block,
                    int64_t end_block, int64_t slice, int64_t slices, const Sum* packed,
                    const DeepEnd<T>& last, Sum* scratch, T* y) const;
};

}  // namespace
}  // namespace ece408
