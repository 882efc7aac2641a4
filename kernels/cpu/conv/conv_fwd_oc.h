// Convolutions with many filters and long sums, vectorised over output channels; pixels are
// broadcast. Forward, and the gradient for x.
//
// A register tile holds a few adjacent output pixels by one or two vectors of filters. All lanes
// are used whatever the plane's size and the stride, but the result must be transposed, so this
// pays for long sums; conv_fwd_ow.h vectorises over output columns.
//
// The source is padded once per image, with the columns of each residue modulo the stride side by
// side, so that a tap is an offset. The gradient for x of a strided convolution is one such
// convolution for each residue of x's rows and columns, with the taps that reach it: no zeros are
// multiplied.
//
// Winograd F(2,3) (winograd_f23.h) saves products in one dimension for kernels that are higher than
// their stride, or have one row, and in two dimensions without strides. There is one sum for each
// of 4 or 16 transformed components. The 4 are made of whole images. The 16 are made of a few
// pixels at a time, packed as tiles for many filters; such tiles can reach from row to row, so
// small planes are also packed without Winograd.
#pragma once

#include "conv/oc_macro_tile.h"
#include "conv/oc_rows.h"
#include "conv/oc_weights.h"
#include "host/buffer.h"
#include "host/thread_pool.h"

namespace ece408 {
namespace {

// Cost model, relative to the products of one tile with one block: packing the tile's pixels,
// reading the block's weights.
constexpr double kPackPixelsCost = 0.6, kReadWeightsCost = 1;
// Up to this number of threads, all are assumed to be equally fast.
constexpr int kFewThreads = 4;
// The most chunks per thread.
constexpr int64_t kChunksPerThread = 8;
// Elements of the padded source per tap up to which the weights of partial sums are packed on
// demand. Each thread then reads all pixels once per block; more taps make up for more reading.
constexpr int64_t kPartPackSource = 1 << 19;
// Elements up to which threads pad private copies of their rows, and up to which all buffers are
// one allocation.
constexpr int64_t kPrivateElements = 4 << 20, kOneBufferElements = 4 << 20;
// Cost model, relative to one FMA tile: padding one input, loading one weight.
constexpr double kPadCost = 0.8, kLoadWeightCost = 0.4;
// Transformed weights of a block from which on they are packed per partial sum: more do not stay in
// a core's cache.
constexpr int64_t kPartPackWinograd = 1 << 17;

// Whether the chunks divide evenly among the threads, or almost.
inline bool divides_evenly(int64_t chunks, int threads) {
    return chunks % threads == 0 || chunks >= kChunksPerThread * threads;
}

// The next larger number of parts with a smaller largest part; more than `all` if there is none.
inline int64_t finer(int64_t all, int64_t parts) {
    const int64_t largest = (all + parts - 1) / parts;
    return largest > 1 ? (all + largest - 2) / (largest - 1) : all + 1;
}

// How a call is split into chunks.
struct WorkSplit {
    bool by_image;           // a thread pads an image and computes all of it
    int64_t images_at_once;  // images that are padded before any is computed
    int64_t slices;          // of the pixels of the padded images
    int64_t parts;           // of the blocks of a group

    // `image` and `packed`: elements of a padded image and of a block's weights; the larger one
    // stays in the thread's own cache. `pixels`: of an image's phase; `grain` of them are not
    // divided. `each`: chunks are single blocks. `whole`: chunks have all blocks and read all
    // weights.
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
    // Cost of `chunks` chunks. It adds a part of a round because threads are not equally fast; more
    // if they are many.
    static double time(int64_t chunks, int64_t tiles, int64_t blocks, bool packs_pixels, int threads) {
        const double lost = threads > kFewThreads ? 1 : 0.25;
        const double rounds = static_cast<double>((chunks + threads - 1) / threads) + lost;
        const double all = static_cast<double>(blocks);
        const double pack_cost = packs_pixels ? kPackPixelsCost : 0;
        return rounds * (static_cast<double>(tiles) * (all + pack_cost) + kReadWeightsCost * all);
    }
};

// Two threads that each pad the rows of a single image that they need. It pays if padding takes
// longer than reading all weights, which both then do: reading what another core has written is
// slow. More threads would have too few rows each.
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

    // Pads the rows that slice `slice` of `slices` needs into a thread's image. The first call pads
    // all rows that the thread is likely to need.
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

    // Rows of some slices.
    RowRange rows(int64_t first, int64_t after, int64_t slices) const {
        const int64_t end = grains() * after / slices * grain();
        return plan_.rows_of(grains() * first / slices * grain(), end < pixels() ? end : pixels());
    }

    const OcPlan<T, Sum>& plan_;
    bool pay_;
    RowRange done_[kThreads] = {};
};

// Packs the weights of all units; `packed` has room for them.
template <class T, class Sum>
void pack_oc(const OcPlan<T, Sum>& plan, Sum* packed, int threads) {
    parallel_for(threads, plan.units(),
                 [&](int64_t unit, int) { plan.pack(unit, packed + unit * plan.packed()); });
}

// `kept`: the packed weights of all units, or null. False without memory; then nothing has been
// written.
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
    // With many images a thread computes all blocks of an image; with few, some of them.
    plan.packs_pixels = plan.should_pack_pixels(conv.batch >= threads ? blocks : blocks * conv.batch / threads);
    PrivateRows<T, Sum> private_rows(plan, kept != nullptr, threads);
    const WorkSplit split(conv, blocks, plan.image(), plan.packed(),
                          conv.phase[0].rows * conv.phase[0].columns, plan.grain(conv.phase[0]),
                          plan.packs_pixels, plan.packs_each, private_rows.pay(), threads);
    const int64_t images = split.by_image || private_rows.pay() ? threads : split.images_at_once;
    const int64_t packings = kept || plan.packs_parts ? 0 : plan.packs_each ? threads : units;
    const int64_t own_scratch = plan.scratch();
    // Fresh memory costs page faults. The allocator returns blocks of more than 32 MiB after each
    // call, so large buffers are separate; it also returns memory at the top of the heap above
    // twice the largest freed block, so small buffers are one.
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
        // Slices of a part follow each other, so that its weights stay in a cache.
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
