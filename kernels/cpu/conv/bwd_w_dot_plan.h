// Plan of conv_bwd_w_dot.cpp: chunks of pixels, tiles and tasks.
#pragma once

#include <type_traits>

#include "conv/flat_image.h"
#include "micro/dot_tile.h"
#include "micro/lanes.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// Bytes of a chunk that a tile reads, and that a block of filters has of dy. The first may exceed
// the first-level cache, as long as x, most of it, stays there; the second stays in the
// second-level cache. Fitted, like the numbers below, to the times of nine layers with AVX-512.
constexpr int64_t kChunkBytes = 44 << 10, kBlockBytes = 512 << 10;
// The least pixels of a chunk, if there are as many: with fewer, adding lanes would take as long as
// a tile.
constexpr int64_t kLeastChunk = 512;
// Once a tile is filled to this fraction, no more channels are added to a set.
constexpr double kFilledTile = 0.85;
// The number of tasks wanted, the taps of a task that pay for copying dy, and the most bytes of
// totals of several splits.
constexpr int64_t kDotTasks = 32, kLeastTaps = 96;
constexpr int64_t kSplitBytes = 2 << 20;

struct Span {
    int64_t begin, end;

    int64_t count() const { return end - begin; }
};

// Part `part` of `total`, divided into `parts` as evenly as possible.
inline Span span_of(int64_t total, int64_t parts, int64_t part) {
    return {total * part / parts, total * (part + 1) / parts};
}

// Rows of dy, or row pairs with Winograd, of some images.
struct Chunk {
    Span images, rows;
};

// Tile `tile` of `tiles` over a set's taps in a component, with `taps` per channel.
struct Column {
    int64_t component, tile, tiles, taps;
};

// A tap of a component.
struct ComponentTap {
    int64_t residue, group, column;  // of kernel rows; kernel column
    int64_t thirds;                  // lower residues whose last group has three rows
};

struct WeightPlan {
    Sweep s;
    bool in_place;       // x and dy are read in place, as rows of one vector
    bool winograd;       // F(3,2) along rows of dy
    int64_t components;  // four with Winograd, each with its own x and dy; else one
    int64_t taps;        // per channel in a component,
    int64_t last_taps;   // but in the fourth component, which only groups of three rows have
    int64_t rows;        // of an image's dy, or row pairs
    FlatImage f;         // `phase` and `channel` of a chunk; a component is a phase
    int64_t halo;        // rows that the windows of a chunk reach beyond it
    int64_t tail;        // zeros behind the last row, which windows reach
    int64_t images;      // parts of the batch, each some images
    int64_t parts;       // parts of an image; only one of the two is more than a whole
    int64_t x_image;     // from image to image, in a phase
    int64_t dy_row;      // pixels of a chunk, for a filter and component
    int64_t filter_tiles, filter_blocks;
    int64_t channel_sets, channel_blocks;  // channels of a set are copied together
    int64_t tap_tiles, last_tiles;         // of a set in a component, and in the fourth one
    int64_t splits;

    int64_t window() const { return s.kernel_h * s.kernel_w; }
    // Elements of an image.
    int64_t image_of_x() const { return s.channels * s.height * s.width; }
    int64_t image_of_dy() const { return s.filters * s.out_height * s.out_width; }
    int64_t chunks() const { return images * parts; }
    int64_t places() const { return s.groups * filter_blocks * channel_blocks; }
    // Whether a chunk of x is a plain copy of its rows.
    bool copies_whole() const {
        return f.row == s.width && s.pad_w == 0 && s.pad_h == 0 && s.stride_w == 1 && s.stride_h == 1;
    }
    // Images without rows between them form one run.
    bool joined() const { return halo == 0; }
    int64_t most_channels() const { return divide_up(s.group_channels, channel_sets); }
    int64_t most_tiles() const { return divide_up(filter_tiles, filter_blocks); }
    // Totals of a task.
    int64_t totals() const {
        return divide_up(channel_sets, channel_blocks) * columns() * most_tiles() * kDotsOfTile;
    }
    int64_t columns() const { return winograd ? 3 * tap_tiles + last_tiles : tap_tiles; }
    Column column(int64_t index) const {
        const int64_t component = winograd && index / tap_tiles > 2 ? 3 : index / tap_tiles;
        const bool last = component == 3;
        return {component, index - component * tap_tiles, last ? last_tiles : tap_tiles,
                last ? last_taps : taps};
    }
    // Winograd's groups of the kernel rows of a residue modulo the stride.
    F23 residue(int64_t r) const {
        return f23_of_residue(s.kernel_h, s.stride_h, r, s.out_height);
    }
    // Tap `tap` of a channel in a component.
    ComponentTap component_tap(int64_t component, int64_t tap) const {
        const int d = static_cast<int>(component);
        ComponentTap at = {0, tap / s.kernel_w, tap % s.kernel_w, 0};
        F23 rows = residue(0);
        while (at.group >= rows.groups_in(d)) {
            at.group -= rows.groups_in(d);
            at.thirds += rows.groups_in(3);
            rows = residue(++at.residue);
        }
        at.group += rows.first_group(d);
        return at;
    }
    Chunk chunk(int64_t index) const {
        return {span_of(s.batch, images, index / parts),
                span_of(rows, parts, index % parts)};
    }
    // Rows of dy.
    Span rows_of(const Chunk& chunk) const {
        if (!winograd) return chunk.rows;
        const int64_t end = 2 * chunk.rows.end;
        return {2 * chunk.rows.begin, end < s.out_height ? end : s.out_height};
    }
    bool strides() const { return s.stride_h > 1 || s.stride_w > 1; }
    // Row length of copies before the transform, and the floats of these copies.
    int64_t copied_row(int64_t lanes) const { return round_up(f.row, lanes); }
    int64_t scratch(int64_t lanes) const {
        const int64_t row = strides() ? copied_row(lanes) : s.width > s.out_width ? s.width : s.out_width;
        return round_up((2 * (divide_up(rows, parts) + halo) + 2) * row + lanes, lanes);
    }
};

inline int64_t taps_reach(int64_t kernel, int64_t stride, int64_t dilate) {
    return (kernel - 1) * dilate / stride;
}

inline int64_t phases_with_taps(int64_t kernel, int64_t stride, int64_t dilate) {
    int64_t phases = 0;
    for (int64_t phase = 0; phase < stride && phase < kernel * dilate; ++phase)
        phases += has_taps(phase, kernel, stride, dilate);
    return phases;
}

// The least row length: windows reach zeros behind a row's end, which may be the next row's leading
// zeros.
inline int64_t least_row(const Sweep& s) {
    const int64_t reach = s.out_width + taps_reach(s.kernel_w, s.stride_w, s.dilate_w);
    int64_t row = s.out_width;
    for (int64_t phase = 0; phase < s.stride_w && phase < s.kernel_w * s.dilate_w; ++phase) {
        if (!has_taps(phase, s.kernel_w, s.stride_w, s.dilate_w)) continue;
        const int64_t before = s.pad_w - phase, behind = before + s.width;
        const int64_t zeros = before > 0 ? divide_up(before, s.stride_w) : 0;
        const int64_t end = behind > 0 ? divide_up(behind, s.stride_w) : 0;
        const int64_t own = end < reach ? end : reach;
        if (row < own) row = own;
        if (row < reach - zeros) row = reach - zeros;
    }
    return row;
}

// Channels of a set: the fewest that fill tiles.
inline int64_t channels_at_once(int64_t window, int64_t channels) {
    int64_t count = 1;
    for (; count < channels && count < kDotTaps; ++count) {
        const int64_t taps = count * window, tiles = divide_up(taps, kDotTaps);
        if (static_cast<double>(taps) >= kFilledTile * static_cast<double>(tiles * kDotTaps)) break;
    }
    return count;
}

template <class Sum>
void plan_chunks(WeightPlan* plan) {
    const Sweep& s = plan->s;
    const int64_t bytes = static_cast<int64_t>(sizeof(Sum)), lanes = Lanes<Sum>::count;
    // A tile's taps belong to one component, and to at most as many phases of channels as it has
    // taps.
    const int64_t phases = phases_with_taps(s.kernel_h, s.stride_h, s.dilate_h) *
                           phases_with_taps(s.kernel_w, s.stride_w, s.dilate_w) * plan->most_channels();
    const int64_t rows_in_use = kDotFilters + (phases < kDotTaps ? phases : kDotTaps);
    int64_t pixels = kChunkBytes / bytes / rows_in_use;
    if (pixels < kLeastChunk) pixels = kLeastChunk;
    const int64_t image = plan->rows * plan->f.row;
    plan->parts = divide_up(image, pixels);
    if (plan->parts > plan->rows) plan->parts = plan->rows;
    const int64_t at_once = plan->parts == 1 && image < pixels ? pixels / image : 1;
    plan->images = divide_up(s.batch, at_once);
    const int64_t images = divide_up(s.batch, plan->images);
    const int64_t rows = divide_up(plan->rows, plan->parts);
    const int64_t runs = plan->joined() ? 1 : images;
    plan->x_image = (rows + plan->halo) * plan->f.row + (plan->joined() ? 0 : plan->tail);
    plan->dy_row = runs * round_up(images / runs * rows * plan->f.row, lanes);
    // The transform writes aligned vectors.
    if (plan->winograd && !plan->joined()) plan->x_image = round_up(plan->x_image, lanes);
    // Rows a multiple of a page apart would share sets of the first-level cache.
    if (plan->dy_row / lanes % 2 == 0) plan->dy_row += lanes;
    // Room behind the last image, where the last tap is multiplied by the zeros between dy's rows.
    const int64_t reach = taps_reach(s.kernel_w, s.stride_w, s.dilate_w);
    plan->f.phase = round_up(images * plan->x_image + reach + lanes, lanes);
    plan->f.channel = plan->f.phase * plan->components * s.stride_h * s.stride_w;
}

// Planes a multiple of a page apart would share sets of the caches.
template <class T, class Sum>
bool reads_in_place(const Sweep& s) {
    constexpr int64_t kPageBytes = 4096;
    const int64_t pixels = s.height * s.width;
    const bool has_all = s.out_height == s.height && s.out_width == s.width;
    return std::is_same<T, Sum>::value && is_flat(s) && has_all &&
           pixels % Lanes<Sum>::count == 0 && pixels * static_cast<int64_t>(sizeof(Sum)) % kPageBytes != 0;
}

template <class T, class Sum>
WeightPlan plan_weight(Sweep s) {
    WeightPlan plan = {};
    plan.in_place = reads_in_place<T, Sum>(s);
    if (plan.in_place) {
        s.height = s.out_height = s.height * s.width / Lanes<Sum>::count;
        s.width = s.out_width = Lanes<Sum>::count;
    }
    plan.s = s;
    plan.winograd = bwd_w_uses_winograd(s, sizeof(Sum) == sizeof(double));
    plan.components = plan.winograd ? kComponents : 1;
    plan.taps = plan.winograd ? 0 : plan.window();
    for (int64_t r = 0; plan.winograd && r < s.stride_h; ++r) {
        plan.taps += plan.residue(r).groups * s.kernel_w;
        plan.last_taps += plan.residue(r).groups_in(3) * s.kernel_w;
    }
    plan.rows = plan.winograd ? divide_up(s.out_height, 2) : s.out_height;
    plan.f.row = least_row(s);
    plan.halo = plan.winograd ? plan.residue(0).groups - 1
                              : taps_reach(s.kernel_h, s.stride_h, s.dilate_h);
    plan.tail = s.out_width + taps_reach(s.kernel_w, s.stride_w, s.dilate_w) - plan.f.row;
    if (plan.tail < 0) plan.tail = 0;
    plan.channel_sets =
        divide_up(s.group_channels, channels_at_once(plan.taps, s.group_channels));
    plan.tap_tiles = divide_up(plan.most_channels() * plan.taps, kDotTaps);
    plan.last_tiles = divide_up(plan.most_channels() * plan.last_taps, kDotTaps);
    plan_chunks<Sum>(&plan);

    plan.filter_tiles = divide_up(s.group_filters, kDotFilters);
    const int64_t row = plan.components * plan.dy_row * static_cast<int64_t>(sizeof(Sum));
    const int64_t tiles = kBlockBytes / (row * kDotFilters);
    plan.filter_blocks = divide_up(plan.filter_tiles, tiles < 1 ? 1 : tiles);
    plan.channel_blocks = 1;
    plan.splits = divide_up(kDotTasks, plan.places());
    const int64_t bytes = plan.places() * plan.totals() * static_cast<int64_t>(sizeof(double));
    if (plan.splits > kSplitBytes / bytes) plan.splits = kSplitBytes / bytes;
    if (plan.splits > plan.chunks()) plan.splits = plan.chunks();
    if (plan.splits < 1) plan.splits = 1;
    plan.channel_blocks = divide_up(kDotTasks, plan.places() * plan.splits);
    const int64_t blocks = s.group_channels * plan.window() / kLeastTaps;
    if (plan.channel_blocks > blocks) plan.channel_blocks = blocks;
    if (plan.channel_blocks > plan.channel_sets) plan.channel_blocks = plan.channel_sets;
    if (plan.channel_blocks < 1) plan.channel_blocks = 1;
    return plan;
}

}  // namespace
}  // namespace ece408
