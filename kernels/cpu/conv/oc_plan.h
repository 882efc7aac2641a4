// Plan of a call of conv_fwd_oc.h: sizes, offsets, and what each step does.
#pragma once

#include "conv/oc_epilogue.h"
#include "conv/oc_f23_rows.h"
#include "conv/oc_geometry.h"
#include "conv/oc_tile.h"
#include "conv/textbook.h"
#include "micro/row_copy.h"

namespace ece408 {
namespace {

// Limits of one macro-tile: output pixels, accumulators, packed elements. With 16 lanes the packed
// elements hold three tiles of F(2,3) in two dimensions, so that a block's weights are read from
// memory once per macro-tile.
constexpr int64_t kMacroTilePixels = 256, kMacroTileSums = 4096;
constexpr int64_t kMacroTilePacked =
    ECE408_LANES == 16 ? 3 * kComponents2d * kSumBlock * kOcPixels : 3 << 15;
// Blocks per thread from which on pixels are packed without Winograd, with vectors of less than 16
// lanes, if rows are short or strided.
constexpr int64_t kPackPixelsBlocks = 8;
// Elements of any type that fill whole cache lines.
constexpr int64_t kLineElements = 16;
// Output pixels of a batch up to which threads pack unkept weights on demand, so that packed
// weights stay in the core's cache: the weights of one partial sum, or of one block. Larger batches
// pack all weights first.
constexpr int64_t kPartPackPixels = 1024, kBlockPackPixels = 400;

// The weight of filter m (a lane), channel c and tap (p, q) of a group is at first + group *
// group_step + m * filter_step + c * channel_step + p * kernel_w + q.
template <class T>
struct OcWeights {
    const T* first;
    int64_t group_step, filter_step, channel_step;
};

// Whether outputs are written by non-temporal stores, which takes whole lines.
template <class T>
bool streams_output(const OcConv& conv, const Epilogue<T>& epilogue) {
    const int64_t outputs = conv.batch * conv.groups * conv.group_filters * conv.out_height * conv.out_width;
    return ECE408_STREAMS && !epilogue.accumulate && !epilogue.affine.added && conv.out_width % kLanes == 0 &&
           exceeds_caches(outputs * static_cast<int64_t>(sizeof(T)));
}

// Rows of the padded source, or of each component in one dimension.
struct RowRange {
    int64_t begin, end;
};

// A macro-tile: pixels [begin, end) of a phase, counted through the rows of some images and cut
// into register tiles; `done` and `count` are the numbers of terms summed before and in this pass.
struct MacroTile {
    const Phase& phase;
    int64_t begin, end, tiles, done, count, outputs;
    int64_t first[kPartPackPixels + 1];  // of each tile: first pixel, relative to `begin`
    int64_t at[kPartPackPixels];         // offset in the images, if pixels are not packed
    int64_t in_first[kPartPackPixels];   // pixels in its first row
    int64_t gap[kPartPackPixels];        // offset from its first to its second row
    OutputRun output[2 * kPartPackPixels];

    MacroTile(const Phase& phase, int64_t begin, int64_t end)
        : phase(phase), begin(begin), end(end), tiles(0), done(0), count(0), outputs(0) {}

    int64_t pixels() const { return end - begin; }
    int64_t pixels(int64_t tile) const { return first[tile + 1] - first[tile]; }
};

// Prepared once per call and shared by its threads.
template <class T, class Sum>
struct OcPlan {
    const OcConv& conv;
    OcWeights<T> weights;
    Textbook book;      // of the output
    int64_t blocks;     // of filters per group
    bool packs_each;    // threads pack a block's weights on demand,
    bool packs_parts;   // or those of one partial sum
    bool packs_pixels;  // packed tiles may reach from row to row; others end with a row
                       // Per phase [channel][tap]: offset from pixel (0, 0) in the padded source.
    Buffer<int64_t> offset;

    OcPlan(const OcConv& conv, const OcWeights<T>& weights, const Textbook& book)
        : conv(conv),
          weights(weights),
          book(book),
          packs_each(false),
          packs_parts(false),
          packs_pixels(false) {
        const int64_t most = kOcVectors * Lanes<Sum>::count;
        blocks = (conv.group_filters + most - 1) / most;
    }

    int64_t units() const { return conv.groups * blocks; }
    int64_t row() const { return conv.step_w * conv.row; }
    int64_t channel() const { return conv.rows * row(); }
    int64_t image() const { return conv.groups * conv.group_channels * channel(); }
    int64_t first(int64_t block) const { return block * kOcVectors * Lanes<Sum>::count; }
    int64_t filters(int64_t block) const {
        const int64_t left = conv.group_filters - first(block);
        const int64_t most = kOcVectors * Lanes<Sum>::count;
        return left < most ? left : most;
    }
    int64_t vectors(int64_t block) const {
        return (filters(block) + Lanes<Sum>::count - 1) / Lanes<Sum>::count;
    }
    // Packed weights of a block, all phases.
    int64_t packed() const {
        return conv.group_channels * conv.window * kOcVectors * Lanes<Sum>::count;
    }
    // Whether tiles that reach from row to row pay for packing, for a thread with this number of
    // blocks.
    bool should_pack_pixels(int64_t own_blocks) const {
        const int64_t columns = conv.phase[0].columns;
        const int64_t tiles = (columns + kOcPixels - 1) / kOcPixels;
        const bool is_better = conv.step_w > 1 || 3 * columns < 2 * kOcPixels * tiles;
        return conv.winograd_2d || (ECE408_LANES < 16 && !conv.winograd && !packs_each && is_better &&
                                    own_blocks >= kPackPixelsBlocks);
    }
    // Terms of a sum: channels with Winograd, else products of a phase; and the most per partial
    // sum.
    int64_t summed(const Phase& phase) const {
        return conv.group_channels * (conv.winograd ? 1 : phase.taps);
    }
    int64_t most_summed() const {
        if (!conv.winograd) return kSumBlock;
        const int64_t taps = conv.phase[0].taps;
        return taps < kSumBlock ? kSumBlock / taps : 1;
    }
    int64_t components() const { return conv.winograd ? conv.phases : 1; }
    // Packed elements per pixel.
    int64_t pixel_factors() const {
        const int64_t most = most_summed();
        if (!conv.winograd_2d) return packs_pixels ? most : 0;
        return conv.window * (conv.group_channels < most ? conv.group_channels : most);
    }
    // The most pixels of a macro-tile for this number of blocks.
    int64_t most_pixels(int64_t blocks) const {
        const int64_t kept = conv.winograd && conv.group_channels <= most_summed() ? 1 : blocks;
        const int64_t sums = kMacroTileSums / (components() * kept);
        const int64_t factors = packs_pixels ? kMacroTilePacked / pixel_factors() : sums;
        const int64_t most = sums < factors ? sums : factors;
        const int64_t longest = packs_parts ? kPartPackPixels : kMacroTilePixels;
        return most < kOcPixels ? kOcPixels : most < longest ? most : longest;
    }
    // Pixels of a tile that spans two rows of a phase, or 0. It holds two whole short rows, or
    // kOcPixels of long rows if tiles within a row would average less than four fifths of that.
    int64_t of_two_rows(const Phase& phase) const {
        if (packs_pixels) return 0;
        if (2 * phase.columns <= kOcPixels) return 2 * phase.columns;
        const int64_t tiles = (phase.columns + kOcPixels - 1) / kOcPixels;
        const bool are_small = 5 * phase.columns < 4 * kOcPixels * tiles;
        return ECE408_LANES == 16 && phase.columns >= kOcPixels && are_small ? kOcPixels : 0;
    }
    // Pixels of a phase that are not divided: a tile, or a row, at whose end tiles end.
    int64_t grain(const Phase& phase) const {
        if (of_two_rows(phase) > 0) return of_two_rows(phase);
        return packs_pixels || phase.columns > most_pixels(1) ? kOcPixels : phase.columns;
    }
    // Scratch of a thread: packed pixels, accumulators, and rows after the output transform. Vector
    // copies write beyond the packed pixels and read beyond images.
    int64_t factors() const {
        const int64_t all = (most_pixels(1) + kOcPixels) * pixel_factors() + components() * beyond();
        return (all + kLineElements - 1) / kLineElements * kLineElements;  // accumulators begin with a line
    }
    int64_t sums() const { return kMacroTileSums * kOcVectors * Lanes<Sum>::count; }
    int64_t transformed() const { return conv.winograd ? sums() / 2 : 0; }
    int64_t part_weights() const {
        return most_summed() * (conv.winograd ? conv.window : 1) * kOcVectors * Lanes<Sum>::count;
    }
    int64_t scratch() const {
        return factors() + sums() + transformed() + (packs_parts ? part_weights() : 0);
    }
    int64_t beyond() const { return kRunVectors<Sum> * Lanes<Sum>::count + kMaxF23Dilation; }

    int64_t offsets() const { return conv.group_channels * conv.window; }
    void fill_offsets() {
        for (int64_t t = 0; t < kPrefetchDistance; ++t) offset[offsets() + t] = 0;
        for (int64_t n = 0; n < (conv.winograd_2d ? 0 : conv.phases); ++n) {
            const Phase& phase = conv.phase[n];
            int64_t* next = offset + conv.group_channels * phase.first_tap;
            for (int64_t c = 0; c < conv.group_channels; ++c)
                for (int64_t t = 0; t < phase.taps; ++t)
                    *next++ = c * channel() +
                              (conv.winograd ? component_offset(n, t) : tap_offset(phase.first_tap + t));
        }
    }
    // Offset of a tap in a channel of the source.
    int64_t tap_offset(int64_t tap) const {
        const int64_t x = conv.left + conv.tap[tap].across, y = conv.top + conv.tap[tap].down;
        return y * row() + x % conv.step_w * conv.row + x / conv.step_w;
    }
    // Offset of a tap of row component n: column `tap % kernel_w` of a group of kernel rows of a
    // residue.
    int64_t component_offset(int64_t n, int64_t tap) const {
        const int component = static_cast<int>(n);
        const int64_t x = tap % conv.kernel_w * conv.dilate_w;
        int64_t r = conv.residues - 1;
        while (conv.residue[r].before[n] > tap / conv.kernel_w) --r;
        const Residue& residue = conv.residue[r];
        const int64_t group =
            residue.f23.first_group(component) + tap / conv.kernel_w - residue.before[n];
        return residue.place(component) * conv.starts * row() +
               group * (conv.along_columns ? 1 : conv.gap_h * row()) +
               x % conv.step_w * conv.row + x / conv.step_w;
    }

    // Index of a tap in a kernel that may be rotated.
    int64_t tap_place(int64_t tap, int64_t kernel) const {
        return conv.direction < 0 ? kernel - 1 - tap : tap;
    }

    // Phase of component n, and its taps per term of a sum.
    const Phase& phase_of(const MacroTile& s, int64_t n) const {
        return conv.winograd ? conv.phase[n] : s.phase;
    }
    int64_t each(int64_t n) const { return conv.winograd ? conv.phase[n].taps : 1; }

    int64_t block_sums(int64_t pixels) const { return pixels * kOcVectors * Lanes<Sum>::count; }

    // The first output of a block's first filter, in the first image.
    int64_t block_output(int64_t group, int64_t block) const {
        return (group * conv.group_filters + first(block)) * conv.out_height * conv.out_width;
    }

    // Defined in oc_weights.h.
    const T* first_weight(int64_t unit) const;
    void pack(int64_t unit, Sum* out) const;
    void pack_part(int64_t unit, int64_t done, int64_t count, Sum* out) const;
    void pack_winograd(int64_t block, const T* first, int64_t channels, Sum* out) const;
    void transform_taps(int64_t c, int64_t channels, const Sum* taps, int64_t wide, Sum* out) const;
    void transform_row(int64_t c, int64_t channels, int64_t n, int t, const Sum* columns, int64_t wide,
                       Sum* out) const;

    // Defined in oc_rows.h.
    void prefetch_source(const T* source, int64_t first, int64_t rows) const;
    void transform(const T* source, int64_t begin, int64_t end, Sum* out) const;
    RowRange all_rows() const;
    RowRange rows_of(int64_t begin, int64_t end) const;
    void pad(const T* source, const RowRange& rows, Sum* out) const;
    void pad_dilated(const T* source, Sum* out) const;
    RowShape row_shape(int64_t n) const;

    // Defined in oc_macro_tile.h.
    PixelRun run_of(const Phase& phase, int64_t n, int64_t end) const;
    void add_tile(MacroTile* s, int64_t n, int64_t count, const PixelRun& run) const;
    void cut(MacroTile* s) const;
    int64_t place(const MacroTile& s, int64_t n, int64_t tile) const;
    void pack_macro_tile(const Sum* images, const MacroTile& s, Sum* factors) const;
    template <class Weights>
    void add_products(const Sum* images, const MacroTile& s, int64_t block, const Weights& weights,
                      const Sum* next, const Sum* factors, OutputPrefetch<T> output_prefetch, Sum* sums) const;
    template <bool TwoD>
    void transform_sums(const Sum* sums, int64_t step, int64_t count, int64_t wide, Sum* rows) const;
    void find_outputs(MacroTile* s) const;
    OutputPrefetch<T> prefetch_outputs(const MacroTile& s, int64_t group, int64_t block,
                                       bool is_next, const T* y) const;
    void write_output(int64_t group, int64_t block, const OutputRun& output, bool finite,
                      const Epilogue<T>& epilogue, Sum* sums, T* y) const;
    void write_block(const MacroTile& s, int64_t group, int64_t block, const Epilogue<T>& epilogue, Sum* sums,
                     Sum* rows, T* y) const;
    void run_macro_tile(const Sum* images, int64_t group, int64_t first_block, int64_t end_block,
                        const Phase& phase, int64_t begin, int64_t end, const Sum* packed,
                        const Epilogue<T>& epilogue, Sum* scratch, T* y) const;
    void run_blocks(const Sum* images, int64_t count, int64_t group, int64_t first_block,
                    int64_t end_block, int64_t slice, int64_t slices, const Sum* packed,
                    const Epilogue<T>& epilogue, Sum* scratch, T* y) const;
};

}  // namespace
}  // namespace ece408
