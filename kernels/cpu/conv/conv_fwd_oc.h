// Convolutions with many filters and long sums: lanes are filters, pixels are broadcast.
//
// A register tile holds a few neighbouring output pixels by one or two vectors of filters. Every
// lane is used whatever the size of the plane and its stride, for the price of a transposition at
// the end, so this is for sums long enough to pay for it; conv_fwd_ow.h has pixels as lanes.
//
// The source is padded once per image, columns of each residue modulo the stride side by side; a tap is a
// displacement in it. The gradient for x of a strided convolution is one such sum for each residue of x's
// rows and columns modulo the stride, with only the taps that reach it, so that no zeros are multiplied.
//
// Kernels that are higher than their stride take two output rows at a time with fewer products, those of one row
// two columns, those without strides also squares of 2x2 outputs, as winograd_f23.h explains: there is one such
// sum for each of 4 or 16 domains of the source. The 4 are made of an image at once. The 16 are made of a few
// pixels at a time, as tiles that are read in order, for many filters; so a tile can reach from row to row, and
// small planes without domains are laid out like that as well.
#pragma once

#include "conv/oc_macro_tile.h"
#include "conv/oc_rows.h"
#include "conv/oc_weights.h"
#include "host/buffer.h"
#include "host/thread_pool.h"

namespace ece408 {
namespace {

// Whether threads share so many pieces evenly, or almost.
inline bool are_shared_evenly(int64_t pieces, int threads) {
    return pieces % threads == 0 || pieces >= kDeepPieces * threads;
}

// The next larger number of parts of which the largest one is smaller; more than `all` if there is none.
inline int64_t finer(int64_t all, int64_t parts) {
    const int64_t largest = (all + parts - 1) / parts;
    return largest > 1 ? (all + largest - 2) / (largest - 1) : all + 1;
}

// How the work of a call is cut into pieces.
struct DeepShares {
    bool by_image;     // a thread pads an image and computes all of it
    int64_t together;  // images that are padded before any is computed
    int64_t slices;    // of their pixels,
    int64_t parts;     // and of a group's blocks of filters

    // `image` and `packed`: numbers of a padded image, and of a block's weights. What is larger
    // stays in a thread's own cache. `pixels`: of an image's phase, of which `grain` stay together. `each`:
    // pieces are blocks. `whole`: pieces have all blocks, whose weights are read for each.
    DeepShares(const Shape& s, int64_t blocks, int64_t image, int64_t packed, int64_t pixels,
               int64_t grain, bool lays_out, bool each, bool whole, int threads) {
        by_image = !each && (threads == 1 || (s.batch >= 2 * threads && image >= packed));
        together = by_image ? 1 : images_together(s.batch, image);
        slices = parts = 1;
        if (each) parts = blocks;
        if (by_image || each) return;
        if (pixels == 0) return;
        const int64_t grains = (together * pixels + grain - 1) / grain;
        const int64_t most = (whole ? kDeepPieces / 4 : kDeepPieces) * threads;
        const int64_t tiles = (grain + kDeepPixels - 1) / kDeepPixels;
        double least = 0;
        for (int64_t p = 1; p <= (whole ? 1 : blocks) && p <= most; p = finer(blocks, p))
            for (int64_t n = 1; n <= grains && n * p <= most; n = finer(grains, n)) {
                const double time = this->time(s.groups * n * p, (grains + n - 1) / n * tiles,
                                               (blocks + p - 1) / p, lays_out, threads);
                if (least > 0 && time >= least) continue;
                least = time, slices = n, parts = p;
            }
    }

private:
    // Of so many pieces; some of one is lost where threads are not equally fast, as one of many often is.
    static double time(int64_t pieces, int64_t tiles, int64_t blocks, bool lays_out, int threads) {
        const double lost = threads > kDeepFewThreads ? 1 : 0.25;
        const double rounds = static_cast<double>((pieces + threads - 1) / threads) + lost;
        const double all = static_cast<double>(blocks);
        const double laid_out = lays_out ? kDeepLayingOut : 0;
        return rounds * (static_cast<double>(tiles) * (all + laid_out) + kDeepReading * all);
    }
};

// Two threads that each pad for themselves the rows of one image that they compute from, if these take longer
// than all weights, which both read then: what another core has written is slow to read. More threads would
// have too few rows each.
template <class T, class Sum>
class DeepOwnRows {
public:
    DeepOwnRows(const DeepPlan<T, Sum>& plan, bool has_weights, int threads) : plan_(plan) {
        const Deep& deep = plan.deep;
        const double padded = kDeepPadding * static_cast<double>(plan.image());
        const double fetched = kDeepFetching * static_cast<double>(plan.units() * plan.packed());
        pay_ = has_weights && deep.batch == 1 && deep.groups == 1 && threads == kThreads &&
               padded > fetched && grains() >= kThreads && kThreads * plan.image() <= kDeepOwnNumbers;
    }

    bool pay() const { return pay_; }

    // Has a member's image hold what slice `slice` of `slices` is computed from. At first a member gets all
    // that it is likely to need.
    void pad(int64_t slice, int64_t slices, int member, const T* source, Sum* image) {
        RowRange& done = done_[member];
        const RowRange needed = rows(slice, slice + 1, slices);
        if (done.begin <= needed.begin && needed.end <= done.end) return;
        const int64_t after = slice + (slices + kThreads - 1) / kThreads;
        done = done.end > 0 ? needed : rows(slice, after < slices ? after : slices, slices);
        const Deep& deep = plan_.deep;
        for (int64_t c = 0; c < deep.group_channels; ++c)
            plan_.pad(source + c * deep.height * deep.width, done, image + c * plan_.channel());
    }

private:
    static constexpr int kThreads = 2;

    int64_t pixels() const { return plan_.deep.phase[0].rows * plan_.deep.phase[0].columns; }
    int64_t grain() const { return plan_.grain(plan_.deep.phase[0]); }
    int64_t grains() const { return (pixels() + grain() - 1) / grain(); }

    // Of some slices.
    RowRange rows(int64_t first, int64_t after, int64_t slices) const {
        const int64_t end = grains() * after / slices * grain();
        return plan_.rows_of(grains() * first / slices * grain(), end < pixels() ? end : pixels());
    }

    const DeepPlan<T, Sum>& plan_;
    bool pay_;
    RowRange done_[kThreads] = {};
};

// The weights of all units, where `packed` has room for them.
template <class T, class Sum>
void pack_deep(const DeepPlan<T, Sum>& plan, Sum* packed, int threads) {
    share(threads, plan.units(),
          [&](int64_t unit, int) { plan.pack(unit, packed + unit * plan.packed()); });
}

// `kept`: the weights of all units, packed, or null. Returns false if there is no memory, and then has
// written nothing.
template <class T, class Sum>
bool run_deep(DeepPlan<T, Sum>* made, const Sum* kept, const T* source, DeepEnd<T> end, T* out,
              int threads) {
    DeepPlan<T, Sum>& plan = *made;
    const Deep& deep = plan.deep;
    end.streams = streams_output(deep, end);
    const int64_t channels = deep.groups * deep.group_channels, pixels = deep.height * deep.width;
    const int64_t out_image =
        deep.groups * deep.group_filters * deep.out_height * deep.out_width;
    const int64_t units = plan.units(), blocks = plan.blocks;
    const int64_t out_pixels = deep.batch * deep.out_height * deep.out_width;
    plan.packs_each = !kept && !deep.by_squares && threads > 1 && are_shared_evenly(units, threads) &&
                      images_together(deep.batch, plan.image()) == deep.batch;
    const bool stays = deep.batch * plan.image() <= kDeepPartSource * deep.window || units <= threads;
    const bool has_parts = deep.by_pairs ? plan.packed() >= kDeepPartPairs : deep.phases == 1;
    plan.packs_parts = plan.packs_each && has_parts && stays && out_pixels <= kDeepPartPixels;
    plan.packs_each = plan.packs_parts || (plan.packs_each && out_pixels < kDeepBlockPixels);
    // Each of many images is computed by one thread, of few ones some blocks.
    plan.lays_out = plan.should_lay_out(deep.batch >= threads ? blocks : blocks * deep.batch / threads);
    DeepOwnRows<T, Sum> own_rows(plan, kept != nullptr, threads);
    const DeepShares shares(deep, blocks, plan.image(), plan.packed(),
                            deep.phase[0].rows * deep.phase[0].columns, plan.grain(deep.phase[0]),
                            plan.lays_out, plan.packs_each, own_rows.pay(), threads);
    const int64_t images = shares.by_image || own_rows.pay() ? threads : shares.together;
    const int64_t packings = kept || plan.packs_parts ? 0 : plan.packs_each ? threads : units;
    const int64_t own_scratch = plan.scratch();
    // Pages of new memory have to be made. Memory is new in each call if it is larger than 32 MiB, so large
    // parts are apart; or if together with other memory it is twice the largest that was given back, so
    // small parts are one.
    const int64_t all_scratch = threads * own_scratch;
    const int64_t all_images = images * plan.image() + plan.beyond();
    const bool is_one = all_scratch + all_images <= kDeepTogetherNumbers;
    const Buffer<Sum> own(packings * plan.packed()), memory(all_scratch + (is_one ? all_images : 0));
    const Buffer<Sum> apart(is_one ? 0 : all_images);
    plan.offset = Buffer<int64_t>(plan.offsets() + kDeepSoon);
    if (!own || !memory || !apart || !plan.offset) return false;
    Sum* const scratch = memory;
    Sum* const padded = is_one ? memory + all_scratch : apart;
    plan.fill_offsets();
    const Sum* const packed = kept ? kept : own;
    const auto pad = [&](int64_t b, int64_t c, Sum* image) {
        plan.pad(source + (b * channels + c) * pixels, plan.all_rows(), image + c * plan.channel());
    };
    const auto compute = [&](int64_t first, int64_t count, const Sum* image, int64_t group,
                             int64_t part, int64_t slice, int member) {
        const int64_t begin = blocks * part / shares.parts, after = blocks * (part + 1) / shares.parts;
        const int64_t unit = plan.packs_parts ? 0 : plan.packs_each ? member : group * blocks + begin;
        if (plan.packs_each && !plan.packs_parts)
            plan.pack(group * blocks + begin, own + unit * plan.packed());
        plan.run_blocks(image, count, group, begin, after, slice, shares.slices,
                        packed + unit * plan.packed(), end.from(0, first * out_image),
                        scratch + member * own_scratch, out + first * out_image);
#if ECE408_STREAMS
        if (end.streams) finish_streams();
#endif
    };
    if (own_rows.pay()) {
        share(threads, shares.slices, [&](int64_t slice, int member) {
            Sum* const image = padded + member * plan.image();
            own_rows.pad(slice, shares.slices, member, source, image);
            compute(0, 1, image, 0, 0, slice, member);
        });
        return true;
    }
    if (shares.by_image) {
        if (!kept) pack_deep<T, Sum>(plan, own, threads);
        share(threads, deep.batch, [&](int64_t b, int member) {
            Sum* image = padded + member * plan.image();
            for (int64_t c = 0; c < channels; ++c) pad(b, c, image);
            for (int64_t group = 0; group < deep.groups; ++group)
                compute(b, 1, image, group, 0, 0, member);
        });
        return true;
    }
    for (int64_t first = 0; first < deep.batch; first += shares.together) {
        const int64_t left = deep.batch - first;
        const int64_t count = left < shares.together ? left : shares.together;
        const int64_t packing = first == 0 && !plan.packs_each ? packings : 0;
        share(threads, packing + count * channels, [&](int64_t at, int) {
            if (at < packing) return plan.pack(at, own + at * plan.packed());
            const int64_t b = (at - packing) / channels;
            pad(first + b, (at - packing) % channels, padded + b * plan.image());
        });
        // A part's slices one after the other, for which its weights stay in a cache.
        share(threads, deep.groups * shares.parts * shares.slices, [&](int64_t at, int member) {
            const int64_t part = at / shares.slices;
            compute(first, count, padded, part / shares.parts, part % shares.parts,
                    at % shares.slices, member);
        });
    }
    return true;
}

}  // namespace
}  // namespace ece408
