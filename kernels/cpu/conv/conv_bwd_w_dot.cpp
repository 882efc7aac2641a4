// The gradient for w: dot products of dy with shifted images (see flat_image.h), with lanes over
// pixels. It is compiled once per instruction set, with ECE408_ISA its name and ECE408_LANES the floats
// in one of its vectors, and only the constant at the end is not local.
//
// dy is laid out with the images' row length, zeros between its rows, so that each weight's gradient
// is a dot product over flat runs: nothing is transposed, and a kernel of any size, stride or number
// of channels is the same work. Pixels are taken in chunks: of dy those of a block of filters, which
// stay in the second cache, of x those of a few channels at a time, which stay in the first. Sums of a
// chunk are added to totals in double. Layers of a single tap whose planes are whole vectors are read where
// they are.
//
// With higher kernels, and sums in float, rows of dy are taken in pairs, for 4 products in place of 6, 7 of
// 10, or 10 of 14: by Winograd's F(3, 2) for the rows x0 to x3 that the pair dy0, dy1 meets,
//
//     d0 = dy0 * (x0 - x2)              dw0 = d0 + (d1 + d2) / 2
//     d1 = (dy0 + dy1) * (x1 + x2)      dw1 = (d1 - d2) / 2
//     d2 = (dy0 - dy1) * (x2 - x1)      dw2 = (d1 + d2) / 2 + d3
//     d3 = dy1 * (x3 - x1)
//
// where x and dy of each d, a domain, are laid out, and are summed over all pairs. Kernels of other heights
// are cut into groups of two rows, which need no d3, and a last one of three, and with a stride the rows of
// each residue modulo it are a kernel of their own, as in winograd_f23.h.
//
// A piece of work is some filters by some channels over a stretch of the chunks. There are as many
// pieces as many threads can share, if the problem has them, whatever the number of threads, and
// stretches are added up in order: so no result depends on that number.
#include "api/kernels.h"

#include <type_traits>

#include "conv/flat_image.h"
#include "conv/textbook.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/dot_tile.h"
#include "micro/row_copy.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// What a tile reads of a chunk, and a block of filters has of it: the first may exceed the first cache, as
// long as x, which is most of it, stays there; the second stays in the second cache. Fitted, as the
// numbers below, to the times of nine layers with AVX-512.
constexpr int64_t kChunkBytes = 44 << 10, kBlockBytes = 512 << 10;
// Pixels of a chunk, if there are as many: with fewer, adding lanes would take a tile's time.
constexpr int64_t kLeastChunk = 512;
// The share of a tile's taps from which on channels need not be taken together.
constexpr double kFilledTile = 0.85;
// Pieces to have, taps of one that are worth laying out dy for, and what the totals of several stretches
// may take.
constexpr int64_t kWeightPieces = 32, kLeastTaps = 96;
constexpr int64_t kStretchBytes = 2 << 20;

struct Span {
    int64_t begin, end;

    int64_t count() const { return end - begin; }
};

// Part `part` of `total` things that are cut into `parts`, as even as can be.
inline Span span_of(int64_t total, int64_t parts, int64_t part) {
    return {total * part / parts, total * (part + 1) / parts};
}

// Rows of dy, or pairs of rows, of some images.
struct Chunk {
    Span images, rows;
};

// Tile `tile` of the `tiles` that a set's taps in a domain are, `taps` of each channel.
struct Column {
    int64_t domain, tile, tiles, taps;
};

// A tap of a domain.
struct PairTap {
    int64_t residue, group, column;  // of the kernel's rows, and its column
    int64_t thirds;                  // lower residues whose last group has three rows
};

struct WeightPlan {
    Sweep s;
    bool in_place;     // whether x and dy are read where they are, as rows of a vector
    bool by_pairs;     // of rows of dy
    int64_t domains;   // then four, each laid out like x and dy, else one
    int64_t taps;      // of a channel in a domain, but
    int64_t last_taps; // in the fourth domain, which only groups of three rows have
    int64_t rows;      // of an image's dy, or pairs
    FlatImage f;       // `phase` and `channel` are those of a chunk; a domain is a phase
    int64_t halo;      // rows that the windows of a chunk reach beyond it
    int64_t tail;      // zeros behind the last row, which windows reach
    int64_t images;    // parts of the batch, each some images,
    int64_t parts;     // and parts of an image; one of the two is whole
    int64_t x_image;   // from image to image, in a phase
    int64_t dy_row;    // of a filter and a domain: a chunk's pixels
    int64_t filter_tiles, filter_blocks;
    int64_t channel_sets, channel_blocks;  // a set is packed at once
    int64_t tap_tiles, last_tiles;         // of a set in a domain, and in the fourth one
    int64_t stretches;

    int64_t window() const { return s.kernel_h * s.kernel_w; }
    // Numbers of an image.
    int64_t image_of_x() const { return s.channels * s.height * s.width; }
    int64_t image_of_dy() const { return s.filters * s.out_height * s.out_width; }
    int64_t chunks() const { return images * parts; }
    int64_t places() const { return s.groups * filter_blocks * channel_blocks; }
    // Whether a chunk of x is its rows as they are.
    bool copies_whole() const {
        return f.row == s.width && s.pad_w == 0 && s.pad_h == 0 && s.stride_w == 1 && s.stride_h == 1;
    }
    // Images without rows between them are one run.
    bool joined() const { return halo == 0; }
    int64_t most_channels() const { return divide_up(s.group_channels, channel_sets); }
    int64_t most_tiles() const { return divide_up(filter_tiles, filter_blocks); }
    // Totals of a piece.
    int64_t totals() const {
        return divide_up(channel_sets, channel_blocks) * columns() * most_tiles() * kDotsOfTile;
    }
    int64_t columns() const { return by_pairs ? 3 * tap_tiles + last_tiles : tap_tiles; }
    Column column(int64_t index) const {
        const int64_t domain = by_pairs && index / tap_tiles > 2 ? 3 : index / tap_tiles;
        const bool last = domain == 3;
        return {domain, index - domain * tap_tiles, last ? last_tiles : tap_tiles,
                last ? last_taps : taps};
    }
    // The kernel's rows of a residue modulo the stride.
    Pairs residue(int64_t r) const {
        return pairs_of_residue(s.kernel_h, s.stride_h, r, s.out_height);
    }
    // Tap `tap` of a channel in a domain.
    PairTap pair_tap(int64_t domain, int64_t tap) const {
        const int d = static_cast<int>(domain);
        PairTap at = {0, tap / s.kernel_w, tap % s.kernel_w, 0};
        Pairs rows = residue(0);
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
        if (!by_pairs) return chunk.rows;
        const int64_t end = 2 * chunk.rows.end;
        return {2 * chunk.rows.begin, end < s.out_height ? end : s.out_height};
    }
    bool strides() const { return s.stride_h > 1 || s.stride_w > 1; }
    // From row to row of those that are copied before they become domains, and their floats.
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

// The least row length: what windows read beyond a row's end are zeros, and so may be those that the
// next row begins with.
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
    // A tile's taps are of one domain, and of no more phases of channels than taps.
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
    // Domains are written by aligned vectors.
    if (plan->by_pairs && !plan->joined()) plan->x_image = round_up(plan->x_image, lanes);
    // Rows whose distance is a multiple of a page would meet in the first cache.
    if (plan->dy_row / lanes % 2 == 0) plan->dy_row += lanes;
    // Beyond the last image lies what the last tap meets with the zeros between dy's rows.
    const int64_t reach = taps_reach(s.kernel_w, s.stride_w, s.dilate_w);
    plan->f.phase = round_up(images * plan->x_image + reach + lanes, lanes);
    plan->f.channel = plan->f.phase * plan->domains * s.stride_h * s.stride_w;
}

// Planes that lie a multiple of a page apart would meet in the caches.
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
    plan.by_pairs = sums_row_pairs(s, sizeof(Sum) == sizeof(double));
    plan.domains = plan.by_pairs ? kDomains : 1;
    plan.taps = plan.by_pairs ? 0 : plan.window();
    for (int64_t r = 0; plan.by_pairs && r < s.stride_h; ++r) {
        plan.taps += plan.residue(r).groups * s.kernel_w;
        plan.last_taps += plan.residue(r).groups_in(3) * s.kernel_w;
    }
    plan.rows = plan.by_pairs ? divide_up(s.out_height, 2) : s.out_height;
    plan.f.row = least_row(s);
    plan.halo = plan.by_pairs ? plan.residue(0).groups - 1
                              : taps_reach(s.kernel_h, s.stride_h, s.dilate_h);
    plan.tail = s.out_width + taps_reach(s.kernel_w, s.stride_w, s.dilate_w) - plan.f.row;
    if (plan.tail < 0) plan.tail = 0;
    plan.channel_sets =
        divide_up(s.group_channels, channels_at_once(plan.taps, s.group_channels));
    plan.tap_tiles = divide_up(plan.most_channels() * plan.taps, kDotTaps);
    plan.last_tiles = divide_up(plan.most_channels() * plan.last_taps, kDotTaps);
    plan_chunks<Sum>(&plan);

    plan.filter_tiles = divide_up(s.group_filters, kDotFilters);
    const int64_t row = plan.domains * plan.dy_row * static_cast<int64_t>(sizeof(Sum));
    const int64_t tiles = kBlockBytes / (row * kDotFilters);
    plan.filter_blocks = divide_up(plan.filter_tiles, tiles < 1 ? 1 : tiles);
    plan.channel_blocks = 1;
    plan.stretches = divide_up(kWeightPieces, plan.places());
    const int64_t bytes = plan.places() * plan.totals() * static_cast<int64_t>(sizeof(double));
    if (plan.stretches > kStretchBytes / bytes) plan.stretches = kStretchBytes / bytes;
    if (plan.stretches > plan.chunks()) plan.stretches = plan.chunks();
    if (plan.stretches < 1) plan.stretches = 1;
    plan.channel_blocks = divide_up(kWeightPieces, plan.places() * plan.stretches);
    const int64_t blocks = s.group_channels * plan.window() / kLeastTaps;
    if (plan.channel_blocks > blocks) plan.channel_blocks = blocks;
    if (plan.channel_blocks > plan.channel_sets) plan.channel_blocks = plan.channel_sets;
    if (plan.channel_blocks < 1) plan.channel_blocks = 1;
    return plan;
}

// A run of pixels; up to a vector less one of others may follow.
template <class T, class Sum>
void copy_run(const T* source, int64_t count, Sum* out) {
    RowCopy<T, Sum>({1, 0, count, count})(source, out);
}

// Rows of one phase of a channel.
struct PhaseRows {
    int64_t y, x;        // the phase
    int64_t first, count;
};

// Rows are laid out `step` numbers apart.
template <class T, class Sum>
void lay_out_phase(const WeightPlan& plan, const T* source, const PhaseRows& rows, int64_t step, Sum* out) {
    const Sweep& s = plan.s;
    // Pixel k of a row is column k * stride_w - before of the image.
    const int64_t before = s.pad_w - rows.x, behind = before + s.width;
    int64_t begin = before > 0 ? divide_up(before, s.stride_w) : 0;
    int64_t end = behind > 0 ? divide_up(behind, s.stride_w) : 0;
    if (end > plan.f.row) end = plan.f.row;
    if (begin > end) begin = end = 0;
    const RowCopy<T, Sum> copy = {{s.stride_w, begin, end, plan.f.row}};
    const RowCopy<T, Sum> border = {{1, 0, 0, plan.f.row}};
    for (int64_t k = rows.first; k < rows.first + rows.count; ++k, out += step) {
        const int64_t y = rows.y + k * s.stride_h - s.pad_h;
        if (inside(y, s.height) && begin < end)
            copy(source + y * s.width - before, out);
        else
            border(source, out);
    }
}

// How rows of pixels become a row of each domain.
struct DomainSource {
    int64_t left, width;  // zeros before the pixels, and pixels
    int64_t count;        // numbers of the domain's row, with zeros behind the pixels
};

// Rows of the four domains, side by side, by aligned vectors: lanes that a row leaves are the next one's first.
class DomainRows {
public:
    DomainRows(float* out, int64_t domain) : out_(out), domain_(domain) {}

    // `make` is given a vector of each row, and makes one of each domain. Rows that are null are zeros.
    template <int ROWS, class Make>
    void add(const DomainSource& source, const float* const (&rows)[ROWS], const Make& make) {
        const int64_t left = source.left, count = source.count, all = left + source.width;
        const int64_t end = all < count ? all : count;
        bool whole = true;
        for (int r = 0; r < ROWS; ++r) whole = whole && rows[r];
        Vec of[ROWS], domains[kDomains];
        for (int64_t k = -kept_lanes_;; k += kLanes) {
            for (; whole && k >= left && k + kLanes <= end; k += kLanes) {
                ECE408_UNROLL
                for (int r = 0; r < ROWS; ++r) of[r] = load(rows[r] + k - left);
                make(of, domains);
                put(domains);
            }
            kept_lanes_ = count - k;
            if (kept_lanes_ <= 0) break;
            const Mask inside = lanes_between(lane(left - k), lane(end - k));
            ECE408_UNROLL
            for (int r = 0; r < ROWS; ++r)
                of[r] = rows[r] ? load_only(inside, rows[r] + k - left) : broadcast(0.0f);
            make(of, domains);
            ECE408_UNROLL
            for (int d = 0; d < kDomains && k < 0; ++d) domains[d] += kept_[d];
            if (kept_lanes_ < kLanes) {
                ECE408_UNROLL
                for (int d = 0; d < kDomains; ++d) kept_[d] = domains[d];
                return;
            }
            put(domains);
        }
        kept_lanes_ = 0;
    }
    // Zeros, so many and up to a whole vector.
    void end(int64_t zeros) {
        const Vec none[kDomains] = {};
        int64_t left = kept_lanes_ + zeros;
        if (kept_lanes_ > 0) put(kept_), left -= kLanes;
        for (; left > 0; left -= kLanes) put(none);
        kept_lanes_ = 0;
    }

private:
    static int lane(int64_t k) { return static_cast<int>(k < 0 ? 0 : k > kLanes ? kLanes : k); }
    void put(const Vec (&domains)[kDomains]) {
        ECE408_UNROLL
        for (int d = 0; d < kDomains; ++d) store(out_ + d * domain_, domains[d]);
        out_ += kLanes;
    }

    float* out_;
    int64_t domain_, kept_lanes_ = 0;
    Vec kept_[kDomains] = {};
};

// Some rows of a plane, in float, `step` numbers apart.
struct PlaneRows {
    const float* first;
    Span rows;
    int64_t step;

    const float* row(int64_t y) const {
        return y >= rows.begin && y < rows.end ? first + (y - rows.begin) * step : nullptr;
    }
};

// `scratch`: room for those of another type.
template <class T>
PlaneRows rows_of_plane(const T* plane, int64_t width, const Span& rows, float* scratch) {
    const T* const first = plane + rows.begin * width;
    if constexpr (std::is_same<T, float>::value) {
        return {first, rows, width};
    } else {
        copy_run(first, rows.count() * width, scratch);
        return {scratch, rows, width};
    }
}

// The four rows that each of `pairs` meets, the first of which is `top`.
inline void add_x_rows(const DomainSource& source, const PlaneRows& rows, int64_t top, int64_t pairs,
                       DomainRows* out) {
    for (int64_t y = top; y < top + 2 * pairs; y += 2)
        out->add(source, {rows.row(y), rows.row(y + 1), rows.row(y + 2), rows.row(y + 3)},
                 [](const Vec(&x)[4], Vec(&domains)[kDomains]) {
                     domains[0] = x[0] - x[2];
                     domains[1] = x[1] + x[2];
                     domains[2] = x[2] - x[1];
                     domains[3] = x[3] - x[1];
                 });
}

// A chunk of one channel by pairs.
template <class T>
void lay_out_channel_pairs(const WeightPlan& plan, const T* x, const Chunk& chunk, float* scratch,
                           float* out) {
    const Sweep& s = plan.s;
    const int64_t pairs = chunk.rows.count() + plan.halo, top = 2 * chunk.rows.begin - s.pad_h;
    const int64_t bottom = top + 2 * pairs + 2;
    Span some = {top > 0 ? top : 0, bottom < s.height ? bottom : s.height};
    if (some.end < some.begin) some.end = some.begin;
    DomainRows domains(out, plan.f.phase);
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        const PlaneRows rows = rows_of_plane(x + b * plan.image_of_x(), s.width, some, scratch);
        add_x_rows({s.pad_w, s.width, plan.f.row}, rows, top, pairs, &domains);
        if (!plan.joined() || b + 1 == chunk.images.end) domains.end(plan.tail);
    }
}

// The same with a stride: rows of a phase are copied first.
template <class T>
void lay_out_phase_pairs(const WeightPlan& plan, const T* x, const Chunk& chunk, int64_t phase,
                         float* scratch, float* out) {
    const int64_t pairs = chunk.rows.count() + plan.halo, step = plan.copied_row(kLanes);
    const PhaseRows rows = {phase / plan.s.stride_w, phase % plan.s.stride_w, 2 * chunk.rows.begin,
                            2 * pairs + 2};
    DomainRows domains(out, plan.f.phase);
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        lay_out_phase(plan, x + b * plan.image_of_x(), rows, step, scratch);
        add_x_rows({0, plan.f.row, plan.f.row}, {scratch, {0, rows.count}, step}, 0, pairs, &domains);
        if (!plan.joined() || b + 1 == chunk.images.end) domains.end(plan.tail);
    }
}

// A chunk of one filter's dy by pairs.
template <class T>
void lay_out_filter_pairs(const WeightPlan& plan, const T* dy, const Chunk& chunk, float* scratch,
                          float* out) {
    const Sweep& s = plan.s;
    const Span some = plan.rows_of(chunk);
    DomainRows domains(out, plan.dy_row);
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        const PlaneRows rows = rows_of_plane(dy + b * plan.image_of_dy(), s.out_width, some, scratch);
        // The last row of an odd number has no second one.
        for (int64_t y = some.begin; y < some.end; y += 2)
            domains.add({0, s.out_width, plan.f.row}, {rows.row(y), rows.row(y + 1)},
                        [](const Vec(&dy_rows)[2], Vec(&made)[kDomains]) {
                            made[0] = dy_rows[0];
                            made[1] = dy_rows[0] + dy_rows[1];
                            made[2] = dy_rows[0] - dy_rows[1];
                            made[3] = dy_rows[1];
                        });
        if (!plan.joined() || b + 1 == chunk.images.end) domains.end(0);
    }
}

// A chunk of one channel; `x` is the channel's plane of the batch's first image.
template <class T, class Sum>
void lay_out_channel(const WeightPlan& plan, const T* x, const Chunk& chunk, Sum* scratch,
                     Sum* out) {
    if constexpr (std::is_same<Sum, float>::value) {
        if (plan.by_pairs && !plan.strides()) return lay_out_channel_pairs(plan, x, chunk, scratch, out);
        if (plan.by_pairs) {
            for (int64_t phase = 0; phase < plan.s.stride_h * plan.s.stride_w; ++phase)
                if (has_taps(phase % plan.s.stride_w, plan.s.kernel_w, plan.s.stride_w, plan.s.dilate_w))
                    lay_out_phase_pairs(plan, x, chunk, phase, scratch, out + phase * kDomains * plan.f.phase);
            return;
        }
    }
    const Sweep& s = plan.s;
    const int64_t image = plan.image_of_x(), rows = chunk.rows.count() + plan.halo;
    for (int64_t y = 0; y < s.stride_h; ++y) {
        if (!has_taps(y, s.kernel_h, s.stride_h, s.dilate_h)) continue;
        for (int64_t v = 0; v < s.stride_w; ++v) {
            if (!has_taps(v, s.kernel_w, s.stride_w, s.dilate_w)) continue;
            Sum* to = out + (y * s.stride_w + v) * plan.f.phase;
            for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
                if (plan.copies_whole()) {
                    copy_run(x + b * image + chunk.rows.begin * s.width, rows * s.width, to);
                    to += plan.x_image;
                    continue;
                }
                lay_out_phase(plan, x + b * image, {y, v, chunk.rows.begin, rows}, plan.f.row, to);
                memset(to + rows * plan.f.row, 0, static_cast<size_t>(plan.tail) * sizeof(Sum));
                to += plan.x_image;
            }
        }
    }
}

// A chunk of one filter's dy; `dy` is the filter's plane of the batch's first image.
template <class T, class Sum>
void lay_out_filter(const WeightPlan& plan, const T* dy, const Chunk& chunk, Sum* scratch,
                    Sum* out) {
    if constexpr (std::is_same<Sum, float>::value) {
        if (plan.by_pairs) return lay_out_filter_pairs(plan, dy, chunk, scratch, out);
    }
    const Sweep& s = plan.s;
    const int64_t image = plan.image_of_dy();
    const int64_t lanes = Lanes<Sum>::count;
    Sum* const start = out;
    const auto end_run = [&] {
        for (; (out - start) % lanes != 0; ++out) *out = 0;
    };
    const RowCopy<T, Sum> copy = {{1, 0, s.out_width, plan.f.row}};
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        const T* from = dy + b * image + chunk.rows.begin * s.out_width;
        if (plan.f.row == s.out_width) {
            copy_run(from, chunk.rows.count() * plan.f.row, out);
            out += chunk.rows.count() * plan.f.row;
        } else {
            for (int64_t i = 0; i < chunk.rows.count(); ++i, from += s.out_width) {
                copy(from, out);
                out += plan.f.row;
            }
        }
        if (!plan.joined()) end_run();
    }
    end_run();
}

// Rows of some planes of some images that are needed soon: each call asks for some of their lines.
class Ahead {
public:
    Ahead() = default;
    template <class T>
    Ahead(const T* first, int64_t planes, int64_t plane, int64_t images, int64_t image,
          int64_t rows, int64_t row, int64_t pixels)
        : at_(reinterpret_cast<const char*>(first)), planes_(planes), images_(images), rows_(rows),
          lines_(divide_up(pixels * size<T>(), kLineBytes)), plane_(plane * size<T>()),
          image_(image * size<T>()), row_(row * size<T>()) {}

    int64_t lines() const { return planes_ * images_ * rows_ * lines_; }
    void fetch(int64_t count) {
        while (count > 0 && next_plane_ < planes_) {
            const char* const row = at_ + next_plane_ * plane_ + next_image_ * image_ + next_row_ * row_;
            const int64_t left = lines_ - next_line_, some = count < left ? count : left;
            const int64_t end = next_line_ + some;
            for (int64_t line = next_line_; line < end; ++line) __builtin_prefetch(row + line * kLineBytes, 0, 2);
            count -= some, next_line_ = end;
            if (next_line_ < lines_) return;
            next_line_ = 0;
            if (++next_row_ < rows_) continue;
            next_row_ = 0;
            if (++next_image_ < images_) continue;
            next_image_ = 0;
            ++next_plane_;
        }
    }

private:
    static constexpr int64_t kLineBytes = kLine * static_cast<int64_t>(sizeof(float));
    template <class T>
    static constexpr int64_t size() {
        return static_cast<int64_t>(sizeof(T));
    }

    const char* at_ = nullptr;
    int64_t planes_ = 0, images_ = 0, rows_ = 0, lines_ = 0;
    int64_t plane_ = 0, image_ = 0, row_ = 0;
    int64_t next_plane_ = 0, next_image_ = 0, next_row_ = 0, next_line_ = 0;
};

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

    // Floats of a thread: x and dy of a chunk.
    int64_t x_size() const { return plan.in_place ? 0 : plan.most_channels() * plan.f.channel; }
    int64_t scratch_size() const {
        const bool copies = plan.strides() || !std::is_same<T, Sum>::value;
        return plan.by_pairs && copies ? plan.scratch(Lanes<Sum>::count) : 0;
    }
    // Rows are written by whole vectors.
    int64_t dy_size() const {
        if (plan.in_place) return 0;
        return plan.most_tiles() * kDotFilters * plan.domains * plan.dy_row + Lanes<Sum>::count;
    }

    const T* plane_of_x(int64_t group, int64_t channel) const {
        return x + (group * plan.s.group_channels + channel) * plan.s.height * plan.s.width;
    }
    const T* plane_of_dy(int64_t group, int64_t filter) const {
        return dy + (group * plan.s.group_filters + filter) * plan.s.out_height * plan.s.out_width;
    }
    // What a set reads of x in a chunk, and all filters of a place of dy.
    Ahead ahead_of_set(int64_t group, const Span& some, const Chunk& chunk) const {
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
        return Ahead(first + begin * s.width, some.count(), s.height * s.width,
                     chunk.images.count(), plan.image_of_x(), rows,
                     s.stride_h * s.width, apart ? s.width : (end - begin) * s.width);
    }
    Ahead ahead_of_filters(const WeightPlace& place, const Chunk& chunk) const {
        const Sweep& s = plan.s;
        const int64_t plane = s.out_height * s.out_width;
        const Span some = {filters(place.tiles.begin).begin, filters(place.tiles.end - 1).end};
        const T* first = plane_of_dy(place.group, some.begin) +
                         chunk.images.begin * plan.image_of_dy() +
                         plan.rows_of(chunk).begin * s.out_width;
        return Ahead(first, some.count(), plane, chunk.images.count(), plan.image_of_dy(), 1, 0,
                     plan.rows_of(chunk).count() * s.out_width);
    }

    // Adds the products of a piece's chunks.
    void add_chunks(const WeightPlace& place, const Span& chunks, Sum* x_chunk, Sum* dy_chunk,
                    Sum* scratch, double* totals) const {
        const int64_t first = filters(place.tiles.begin).begin;
        for (int64_t index = chunks.begin; index < chunks.end; ++index) {
            const Chunk chunk = plan.chunk(index);
            // The next stretch is likely to be this thread's too.
            const bool last = index + 1 == plan.chunks();
            const Chunk next = plan.chunk(last ? index : index + 1);
            if constexpr (std::is_same<T, Sum>::value) {
                if (plan.in_place) {
                    for (int64_t set = place.sets.begin; set < place.sets.end; ++set)
                        add_set_in_place(place, set, chunk, next, totals);
                    continue;
                }
            }
            Ahead dy_ahead = last ? Ahead() : ahead_of_filters(place, next);
            for (int64_t m = first; m < filters(place.tiles.end - 1).end; ++m)
                lay_out_filter(plan, plane_of_dy(place.group, m), chunk, scratch,
                               dy_chunk + (m - first) * plan.domains * plan.dy_row);
            for (int64_t set = place.sets.begin; set < place.sets.end; ++set) {
                const Span some = channels(set);
                for (int64_t c = some.begin; c < some.end; ++c)
                    lay_out_channel(plan, plane_of_x(place.group, c), chunk, scratch,
                                    x_chunk + (c - some.begin) * plan.f.channel);
                Ahead x_ahead;
                if (set + 1 < place.sets.end)
                    x_ahead = ahead_of_set(place.group, channels(set + 1), chunk);
                else if (!last)
                    x_ahead = ahead_of_set(place.group, channels(place.sets.begin), next);
                add_set(place, set, chunk, x_chunk, dy_chunk, x_ahead, dy_ahead, totals);
            }
        }
    }
    void add_set(const WeightPlace& place, int64_t set, const Chunk& chunk, const Sum* x_chunk,
                 const Sum* dy_chunk, Ahead& x_ahead, Ahead& dy_ahead, double* totals) const {
        const int64_t images = chunk.images.count();
        const int64_t first = filters(place.tiles.begin).begin;
        const int64_t tiles = plan.columns() * place.tiles.count();
        const int64_t x_lines = divide_up(x_ahead.lines(), tiles);
        const int64_t dy_lines = divide_up(dy_ahead.lines(), tiles * place.sets.count());
        DotTile<Sum> tile;
        tile.filter_step = plan.domains * plan.dy_row;
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
                    x_chunk + t / column.taps * plan.f.channel + column.domain * plan.f.phase +
                    offset_of(column.domain, t % column.taps);
            tile.totals_step = some.count();
            const auto whole = pick_dot_tile<Sum>(kDotFilters, some.count());
            for (int64_t m = place.tiles.begin; m < place.tiles.end; ++m) {
                const Span rows = filters(m);
                x_ahead.fetch(x_lines);
                dy_ahead.fetch(dy_lines);
                tile.dy = dy_chunk +
                          ((rows.begin - first) * plan.domains + column.domain) * plan.dy_row;
                tile.totals = totals + slot(place, set, index, m);
                if (rows.count() == kDotFilters)
                    whole(tile);
                else
                    pick_dot_tile<Sum>(rows.count(), some.count())(tile);
            }
        }
    }
    // A chunk's first pixel in the plane of a channel, or of a filter.
    const T* x_at(const WeightPlace& place, int64_t channel, const Chunk& chunk) const {
        return plane_of_x(place.group, channel) + chunk.images.begin * plan.image_of_x() +
               chunk.rows.begin * plan.s.width;
    }
    const T* dy_at(const WeightPlace& place, int64_t filter, const Chunk& chunk) const {
        return plane_of_dy(place.group, filter) + chunk.images.begin * plan.image_of_dy() +
               chunk.rows.begin * plan.s.width;
    }
    // The same where nothing is laid out. The first sets ask for the rows of dy of the chunk `next`, two of
    // each tile; the first tiles ask for those of x for the next set.
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
    // Where a channel's tap finds the pixel of output (0, 0), in its domain.
    int64_t offset_of(int64_t domain, int64_t tap) const {
        const Sweep& s = plan.s;
        if (!plan.by_pairs) return tap_offset(s, plan.f, tap / s.kernel_w, tap % s.kernel_w);
        const PairTap at = plan.pair_tap(domain, tap);
        const int64_t across = at.column * s.dilate_w;
        const int64_t phase = at.residue * s.stride_w + across % s.stride_w;
        return phase * kDomains * plan.f.phase + at.group * plan.f.row + across / s.stride_w;
    }
    // Adds the totals of all stretches to the first one's, and makes them gradients.
    void put(const WeightPlace& place, double* totals) const {
        const int64_t size = plan.totals();
        for (int64_t stretch = 1; stretch < plan.stretches; ++stretch)
            for (int64_t i = 0; i < size; ++i) totals[i] += totals[stretch * size + i];
        for (int64_t set = place.sets.begin; set < place.sets.end; ++set) {
            const Span set_channels = channels(set);
            for (int64_t column = 0; column < plan.tap_tiles; ++column)
                for (int64_t m = place.tiles.begin; m < place.tiles.end; ++m) {
                    if (plan.by_pairs)
                        put_pairs(place, set, column, m, totals);
                    else
                        put_tile(place.group, filters(m), set_channels.begin,
                                 taps(set_channels, plan.column(column)),
                                 totals + slot(place, set, column, m));
                }
        }
    }
    // The totals of a tile's domains become those of two rows of the kernel or, of groups of three, of three.
    void put_pairs(const WeightPlace& place, int64_t set, int64_t column, int64_t m,
                   const double* totals) const {
        const Sweep& s = plan.s;
        const Span rows = filters(m), some = taps(channels(set), plan.column(column));
        const double* of[3];
        for (int64_t domain = 0; domain < 3; ++domain)
            of[domain] = totals + slot(place, set, column + domain * plan.tap_tiles, m);
        int64_t places[kDotTaps];
        Fourth fourth[kDotTaps];
        for (int64_t n = 0; n < some.count(); ++n) {
            const int64_t c = (some.begin + n) / plan.taps, tap = (some.begin + n) % plan.taps;
            const PairTap at = plan.pair_tap(0, tap);
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
                    const double total = finite ? *from : book.settled(*from, to);
                    narrow(static_cast<Sum>(accumulate ? widen(*to) + total : total), to);
                }
        }
    }
    // Totals of the fourth domain: of a tile's first filter, and the step to the next one.
    struct Fourth {
        const double* first;
        int64_t step;
    };
    // For tap `tap` of a set in that domain.
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
            if (!finite) settle(book, totals, 1, count, to, 1);
            for (int64_t t = 0; t < count; ++t)
                narrow(static_cast<Sum>(accumulate ? widen(to[t]) + totals[t] : totals[t]), to + t);
        }
    }
};

template <class T, class Sum = typename Number<T>::Sum>
int backward_weight(const ece408_problem& problem, const T* x, const T* dy, T* dw, bool accumulate,
                    int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, dy, dw, weight_element<T>};
    const WeightPlan plan = plan_weight<T, Sum>(forward_sweep(s));
    const WeightCall<T, Sum> call = {plan, book, x, dy, dw, accumulate};
    const int64_t places = plan.places(), size = plan.totals();
    const int64_t pieces = places * plan.stretches;
    const int team = static_cast<int>(pieces < threads ? pieces : threads);
    const bool one = plan.stretches == 1;
    const Buffer<double> totals((one ? team : pieces) * size);
    // Zeros: vectors reach beyond what is laid out, and meet zeros of dy there.
    const auto x_chunks = shared_zeros<Sum>(team, team * call.x_size());
    const Buffer<Sum> dy_chunks(team * call.dy_size()), scratch(team * call.scratch_size());
    if (!totals || !x_chunks || !dy_chunks || !scratch) return ECE408_NO_MEMORY;
    share(team, pieces, [&](int64_t piece, int member) {
        const WeightPlace place = place_of(plan, piece / plan.stretches);
        const Span chunks = span_of(plan.chunks(), plan.stretches, piece % plan.stretches);
        double* sums = totals + (one ? member : piece) * size;
        memset(sums, 0, static_cast<size_t>(size) * sizeof(double));
        call.add_chunks(place, chunks, x_chunks + member * call.x_size(),
                        dy_chunks + member * call.dy_size(),
                        scratch + member * call.scratch_size(), sums);
        if (one) call.put(place, sums);
    });
    if (!one)
        share(team, places, [&](int64_t index, int) {
            call.put(place_of(plan, index), totals + index * plan.stretches * size);
        });
    return ECE408_OK;
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(weight_sums) = {
    {nullptr, nullptr, backward_weight<float>},
    {nullptr, nullptr, backward_weight<double>},
    {nullptr, nullptr, backward_weight<Half>},
    {nullptr, nullptr, backward_weight<float, double>},
};

}  // namespace ece408
