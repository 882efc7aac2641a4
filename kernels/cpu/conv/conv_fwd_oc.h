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
inline bool divides_evenly(int64_t chunks, int threads) {
    return chunks % threads == 0 || chunks >= kChunksPerThread * threads;
}

// The next larger number of parts of which the largest one is smaller; more than `all` if there is none.
inline int64_t finer(int64_t all, int64_t parts) {
    const int64_t largest = (all + parts - 1) / parts;
    return largest > 1 ? (all + largest - 2) / (largest - 1) : all + 1;
}

// How the work of a call is cut into pieces.
struct WorkSplit {
    bool by_image;     // a thread pads an image and computes all of it
    int64_t images_at_once;  // images that are padded before any is computed
    int64_t slices;    // of their pixels,
    int64_t parts;     // and of a group's blocks of filters

    // `image` and `packed`: numbers of a padded image, and of a block's weights. What is larger
    // stays in a thread's own cache. `pixels`: of an image's phase, of which `grain` stay together. `each`:
    // pieces are blocks. `whole`: pieces have all blocks, whose weights are read for each.
    WorkSplit(const Shape& s, int64_t blocks, int64_t image, int64_t packed, int64_t pixels,
               int64_t grain, bool packs_pixels, bool each, bool whole, int threads) {
        by_image = !each && (threads == 1 || (s.batch >= 2 * threads && image >= packed));
        images_at_once = by_image ? 1 : images_per_pass(s.batch, image);
        slices = parts = 1;
        if (each) parts = blocks;
        if (by_image || each) return;
        if (pixels == 0) return;
        const int64_t grains = (images_at_once * pixels + grain - 1) / grain;
        const int64_t most = (whole ? kChunksPerThread / 4 : kChunksPerThread) * threads;
        const int64_t tiles = (grain + kOcPixels - 1) / kOcPixels;
        double least = 0;
        for (int64_t p = 1; p <= (whole ? 1 : blocks) && p <= most; p = finer(blocks, p))
            for (int64_t n = 1; n <= grains && n * p <= most; n = finer(grains, n)) {
                const double time = this->time(s.groups * n * p, (grains + n - 1) / n * tiles,
                                               (blocks + p - 1) / p, packs_pixels, threads);
                if (least > 0 && time >= least) continue;
                least = time, slices = n, parts = p;
            }
    }

private:
    // Of so many pieces; some of one is lost where threads are not equally fast, as one of many often is.
    static double time(int64_t chunks, int64_t tiles, int64_t blocks, bool packs_pixels, int threads) {
        const double lost = threads > kFewThreads ? 1 : 0.25;
        const double rounds = static_cast<double>((chunks + threads - 1) / threads) + lost;
        const double all = static_cast<double>(blocks);
        const double pack_cost = packs_pixels ? kPackPixelsCost : 0;
        return rounds * (static_cast<double>(tiles) * (all + pack_cost) + kReadWeightsCost * all);
    }
};

// Two threads that each pad for themselves the rows of one image that they compute from, if these take longer
// than all weights, which both read then: what another core has written is slow to read. More threads would
// have too few rows each.
template <class T, class Sum>
class PrivateRows {
public:
    PrivateRows(const OcPlan<T, Sum>& plan, bool has_weights, int threads) : plan_(plan) {
        const OcConv& conv = plan.conv;
        const double padded = kPadCost * static_cast<double>(plan.image());
        const double fetched = kLoadWeightCost * static_cast<double>(plan.units() * plan.packed());
        pay_ = has_weights && conv.batch == 1 && conv.groups == 1 && threads == kThreads &&
               padded > fetched && grains() >= kThreads && kThreads * plan.image() <= kPrivateElements;
    }

    bool pay() const { return pay_; }

    // Has a member's image hold what slice `slice` of `slices` is computed from. At first a member gets all
    // that it is likely to need.
    void pad(int64_t slice, int64_t slices, int thread, const T* source, Sum* image) {
        RowRange& done = done_[thread];
        const RowRange needed = rows(slice, slice + 1, slices);
        if (done.begin <= needed.begin && needed.end <= done.end) return;
        const int64_t after = slice + (slices + kThreads - 1) / kThreads;
        done = done.end > 0 ? needed : rows(slice, after < slices ? after : slices, slices);
        const OcConv& conv = plan_.conv;
        for (int64_t c = 0; c < conv.group_channels; ++c)
            plan_.pad(source + c * conv.height * conv.width, done, image + c * plan_.channel());
    }

private:
    static constexpr int kThreads = 2;

    int64_t pixels() const { return plan_.conv.phase[0].rows * plan_.conv.phase[0].columns; }
    int64_t grain() const { return plan_.grain(plan_.conv.phase[0]); }
    int64_t grains() const { return (pixels() + grain() - 1) / grain(); }

    // Of some slices.
    RowRange rows(int64_t first, int64_t after, int64_t slices) const {
        const int64_t end = grains() * after / slices * grain();
        return plan_.rows_of(grains() * first / slices * grain(), end < pixels() ? end : pixels());
    }

    const OcPlan<T, Sum>& plan_;
    bool pay_;
    RowRange done_[kThreads] = {};
};

// The weights of all units, where `packed` has room for them.
template <class T, class Sum>
void pack_oc(const OcPlan<T, Sum>& plan, Sum* packed, int threads) {
    parallel_for(threads, plan.units(),
          [&](int64_t unit, int) { plan.pack(unit, packed + unit * plan.packed()); });
}

// `kept`: the weights of all units, packed, or null. Returns false if there is no memory, and then has
// written nothing.
template <class T, class Sum>
bool run_oc(OcPlan<T, Sum>* made, const Sum* kept, const T* source, Epilogue<T> epilogue, T* out,
              int threads) {
    OcPlan<T, Sum>& plan = *made;
    const OcConv& conv = plan.conv;
    epilogue.streams = streams_output(conv, epilogue);
    const int64_t channels = conv.groups * conv.group_channels, pixels = conv.height * conv.width;
    const int64_t out_image =
        conv.groups * conv.group_filters * conv.out_height * conv.out_width;
    const int64_t units = plan.units(), blocks = plan.blocks;
    const int64_t out_pixels = conv.batch * conv.out_height * conv.out_width;
    plan.packs_each = !kept && !conv.winograd_2d && threads > 1 && divides_evenly(units, threads) &&
                      images_per_pass(conv.batch, plan.image()) == conv.batch;
    const bool stays = conv.batch * plan.image() <= kPartPackSource * conv.window || units <= threads;
    const bool has_parts = conv.winograd ? plan.packed() >= kPartPackWinograd : conv.phases == 1;
    plan.packs_parts = plan.packs_each && has_parts && stays && out_pixels <= kPartPackPixels;
    plan.packs_each = plan.packs_parts || (plan.packs_each && out_pixels < kBlockPackPixels);
    // Each of many images is computed by one thread, of few ones some blocks.
    plan.packs_pixels = plan.should_pack_pixels(conv.batch >= threads ? blocks : blocks * conv.batch / threads);
    PrivateRows<T, Sum> private_rows(plan, kept != nullptr, threads);
    const WorkSplit split(conv, blocks, plan.image(), plan.packed(),
                            conv.phase[0].rows * conv.phase[0].columns, plan.grain(conv.phase[0]),
                            plan.packs_pixels, plan.packs_each, private_rows.pay(), threads);
    const int64_t images = split.by_image || private_rows.pay() ? threads : split.images_at_once;
    const int64_t packings = kept || plan.packs_parts ? 0 : plan.packs_each ? threads : units;
    const int64_t own_scratch = plan.scratch();
    // Pages of new memory have to be made. Memory is new in each call if it is larger than 32 MiB, so large
    // parts are apart; or if together with other memory it is twice the largest that was given back, so
    // small parts are one.
    const int64_t all_scratch = threads * own_scratch;
    const int64_t all_images = images * plan.image() + plan.beyond();
    const bool is_one = all_scratch + all_images <= kOneBufferElements;
    const Buffer<Sum> own(packings * plan.packed()), memory(all_scratch + (is_one ? all_images : 0));
    const Buffer<Sum> image_memory(is_one ? 0 : all_images);
    plan.offset = Buffer<int64_t>(plan.offsets() + kPrefetchDistance);
    if (!own || !memory || !image_memory || !plan.offset) return false;
    Sum* const scratch = memory;
    Sum* const padded = is_one ? memory + all_scratch : image_memory;
    plan.fill_offsets();
    const Sum* const packed = kept ? kept : own;
    const auto pad = [&](int64_t b, int64_t c, Sum* image) {
        plan.pad(source + (b * channels + c) * pixels, plan.all_rows(), image + c * plan.channel());
    };
    const auto compute = [&](int64_t first, int64_t count, const Sum* image, int64_t group,
                             int64_t part, int64_t slice, int thread) {
        const int64_t begin = blocks * part / split.parts, after = blocks * (part + 1) / split.parts;
        const int64_t unit = plan.packs_parts ? 0 : plan.packs_each ? thread : group * blocks + begin;
        if (plan.packs_each && !plan.packs_parts)
            plan.pack(group * blocks + begin, own + unit * plan.packed());
        plan.run_blocks(image, count, group, begin, after, slice, split.slices,
                        packed + unit * plan.packed(), epilogue.from(0, first * out_image),
                        scratch + thread * own_scratch, out + first * out_image);
#if ECE408_STREAMS
        if (epilogue.streams) stream_fence();
#endif
    };
    if (private_rows.pay()) {
        parallel_for(threads, split.slices, [&](int64_t slice, int thread) {
            Sum* const image = padded + thread * plan.image();
            private_rows.pad(slice, split.slices, thread, source, image);
            compute(0, 1, image, 0, 0, slice, thread);
        });
        return true;
    }
    if (split.by_image) {
        if (!kept) pack_oc<T, Sum>(plan, own, threads);
        parallel_for(threads, conv.batch, [&](int64_t b, int thread) {
            Sum* image = padded + thread * plan.image();
            for (int64_t c = 0; c < channels; ++c) pad(b, c, image);
            for (int64_t group = 0; group < conv.groups; ++group)
                compute(b, 1, image, group, 0, 0, thread);
        });
        return true;
    }
    for (int64_t first = 0; first < conv.batch; first += split.images_at_once) {
        const int64_t left = conv.batch - first;
        const int64_t count = left < split.images_at_once ? left : split.images_at_once;
        const int64_t packing = first == 0 && !plan.packs_each ? packings : 0;
        parallel_for(threads, packing + count * channels, [&](int64_t at, int) {
            if (at < packing) return plan.pack(at, own + at * plan.packed());
            const int64_t b = (at - packing) / channels;
            pad(first + b, (at - packing) % channels, padded + b * plan.image());
        });
        // A part's slices one after the other, for which its weights stay in a cache.
        parallel_for(threads, conv.groups * split.parts * split.slices, [&](int64_t at, int thread) {
            const int64_t part = at / split.slices;
            compute(first, count, padded, part / split.parts, part % split.parts,
                    at % split.slices, thread);
        });
    }
    return true;
}

}  // namespace
}  // namespace ece408
