// Direct convolution, forward and the gradient for x: stride 1, dilation 1, one group and output
// rows of at least a vector, or 1x1 kernels with any stride. This file surrounds the register tile
// of tile.h. Compiled once per instruction set, with ECE408_ISA its name and ECE408_LANES the
// floats of a vector; only the constant at the end is not local.
//
// The tile knows no padding: padded images are copied with their border first. The gradient for x
// is a convolution of dy with the rotated kernel, channels and filters swapped. Zeros of a border
// are multiplied like pixels, so other kernels compute with weights that are not all finite.
//
// The work on an image is a list of tiles, filter block by filter block, and within a block along
// the flat output plane. Threads take whole images or, if images are few, ranges of that list. Each
// tile prefetches a few lines of what its thread reads next: hardware prefetchers stop at the end
// of a page, and such an image has few pages.
//
// 1x1 kernels have their own loop in conv_1x1.h, unless outputs are written by non-temporal stores.
// They treat an image without a border as one row. With strides, the pixels that are read are
// copied first, and gradients for them are stored among zeros.
#include "api/kernels.h"

#include <string.h>

#include "conv/conv_1x1.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/lanes.h"
#include "micro/plane.h"
#include "micro/tile.h"

namespace ece408 {
namespace {

// Sums up to this length write so much per product that outputs that exceed the caches use
// non-temporal stores: other stores would read each line before overwriting it.
constexpr int64_t kStreamedTaps = 72;
// The same for 1x1 kernels: with more channels conv_1x1.h is faster, because it prefetches its
// outputs in time.
constexpr int64_t kStreamed1x1Channels = 32;
static_assert(kStreamed1x1Channels <= kSumChannels, "weights of streamed layers are packed as one sum");

// Floats of the gradients for pixels that strides select: they stay in the second-level cache.
constexpr int64_t kSpreadFloats = 1 << 20;

struct Plan {
    Layer layer;
    Shape shape;  // the layer's
    Tiling tiling;
    const float* packed;
    ece408_epilogue epilogue;  // none without factors
    float* y;
};

int64_t taps(const Shape& s) { return s.channels * s.kernel_h * s.kernel_w; }

// Some tiles of one filter block of one image.
struct TileRun {
    const Plan& plan;
    StripArgs args;
    int64_t filters;
    float* y;  // of the block

    // `ahead`: the image that this thread probably reads next, or null.
    TileRun(const Plan& plan, const float* x, const float* ahead, float* image_y, int64_t block)
        : plan(plan) {
        const Shape& s = plan.shape;
        const int64_t plane = plan.tiling.plane, m = plan.tiling.first_filter(block);
        filters = plan.tiling.filters_of(block);
        y = image_y + m * plane;
        const Layer& layer = plan.layer;
        args = {};
        args.channels = s.channels, args.height = s.height, args.width = s.width;
        args.kernel_h = s.kernel_h, args.kernel_w = s.kernel_w;
        args.x = x, args.y = y, args.filter_step = plane;
        args.epilogue = epilogue_from(plan.epilogue, m, y - plan.y);
        if (ahead) {
            const int64_t lines = divide_up(s.channels * layer.height * layer.width, kLine);
            args.ahead_lines = divide_up(lines, plan.tiling.all());
            args.ahead = ahead + block * plan.tiling.tiles * args.ahead_lines * kLine;
        }
        args.packed = plan.packed + m * (1 + taps(s));
    }

    void set(int64_t vector, int64_t tiles) {
        args.in = plan.tiling.in + vector;
        args.out = plan.tiling.out + vector;
        args.split = plan.tiling.split + vector;
        args.tiles = tiles;
    }

    Strip::Function* pick_strip(int64_t vectors) const {
        return pick_tile<Strip>(args.kernel_w, static_cast<int>(filters),
                                static_cast<int>(vectors));
    }

    void strip_of(int64_t begin, int64_t end, int64_t vectors) {
        if (begin >= end) return;
        set(plan.tiling.first_vector(begin), end - begin);
        args.head = begin == 0;
        pick_strip(vectors)(args);
        args.ahead += args.tiles * args.ahead_lines * kLine;
    }

    void run(int64_t begin, int64_t end) {
        const int64_t wide = plan.tiling.wide, size = plan.tiling.size;
        const int64_t turn = wide < begin ? begin : wide < end ? wide : end;
        strip_of(begin, turn, size + 1);
        strip_of(turn, end, size);
    }

    // Computes tile by tile through scratch, if tiles may not overwrite their neighbours' outputs.
    void run_through_scratch(int64_t begin, int64_t end, bool accumulate) {
        float scratch[kMaxFilters * 4 * kLanes];
        const ece408_epilogue epilogue = args.epilogue;
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t first = plan.tiling.first_vector(tile);
            const int64_t last = plan.tiling.first_vector(tile + 1);
            set(first, 1);
            args.y = scratch;
            args.out = kInScratch;
            args.filter_step = (last - first) * kLanes;
            args.epilogue = {};
            pick_strip(last - first)(args);
            put(plan.tiling, epilogue, scratch, y, filters, first, last, accumulate);
        }
    }

    // Computes the whole plane with non-temporal stores, except for the last tile: its first lanes
    // belong to another tile, too, and are written twice with the same values.
    void run_streamed() {
#if ECE408_STREAMS
        alignas(64) float carried[kMaxFilters * kLanes] = {};
        args.carried = carried;
        const int64_t last = plan.tiling.tiles - 1;
        run(0, last);
        const int64_t out = plan.tiling.first_vector(last) * kLanes;
        for (int64_t m = 0; m < filters && last > 0; ++m)
            end_stream(y + m * args.filter_step, out, carried + m * kLanes);
        args.carried = nullptr;
        run(last, last + 1);
#endif
    }
};

// `whole`: one thread has the whole image.
void run_tiles(TileRun* tile_run, int64_t begin, int64_t end, bool accumulate, bool whole) {
    if (accumulate) return tile_run->run_through_scratch(begin, end, true);
    const Tiling& tiling = tile_run->plan.tiling;
    // Threads must not both write the lanes that two vectors share; a single thread writes them
    // twice.
    const bool through_scratch = !whole && end == tiling.tiles && tiling.first > 0;
    tile_run->run(begin, end - through_scratch);
    if (through_scratch) tile_run->run_through_scratch(end - 1, end, false);
}

// Computes tiles [begin, end) of an image, numbered through its filter blocks.
void run_part(const Plan& plan, const float* x, const float* ahead, float* y, int64_t begin,
              int64_t end, bool accumulate, bool streams, bool whole) {
    int64_t next = 0;
    for (int64_t tile = begin; tile < end; tile = next) {
        const int64_t of_block = plan.tiling.tiles;
        const int64_t block = tile / of_block, start = block * of_block;
        next = start + of_block < end ? start + of_block : end;
        TileRun tile_run(plan, x, ahead, y, block);
        if (streams)
            tile_run.run_streamed();
        else
            run_tiles(&tile_run, tile - start, next - start, accumulate, whole);
    }
}

// Whether outputs are written by non-temporal stores; threads then take whole images.
bool is_streamed(const Shape& s, bool accumulate, int threads) {
    const int64_t vectors = divide_up(s.out_height * s.out_width, kLanes);
    const int64_t most = s.kernel_h * s.kernel_w == 1 ? kStreamed1x1Channels : kStreamedTaps;
    return ECE408_STREAMS && !accumulate && taps(s) <= most &&
           exceeds_caches(4 * s.batch * s.filters * s.out_height * s.out_width) &&
           count_parts(s.batch, s.filters * vectors, threads) == 1;
}

// Threads with whole images copy them with their border themselves; images in parts are copied
// beforehand. False without memory.
bool run(const Plan& plan, const float* x, bool streams, bool accumulate, int threads) {
    const Shape& s = plan.shape;
    const Layer& layer = plan.layer;
    const int64_t pixels = layer.height * layer.width, y_image = s.filters * plan.tiling.plane;
    const int64_t all = plan.tiling.all(), parts = count_parts(s.batch, all, threads);
    const int64_t units = s.batch * parts, padded = s.channels * s.height * s.width;
    const int used_threads = static_cast<int>(threads < units ? threads : units);
    Buffer<float> memory;
    if (!layer.as_it_is()) {
        memory = Buffer<float>((parts == 1 ? used_threads : s.batch) * padded);
        if (!memory) return false;
    }
    float* const copies = memory;
    if (copies && parts > 1)
        parallel_for(used_threads, s.batch * s.channels, [&](int64_t c, int) {
            pad_channel(layer, x + c * pixels, copies + c * s.height * s.width);
        });
    parallel_for_ranges(used_threads, units, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t b = unit / parts, part = unit % parts;
            const float* image = x + b * s.channels * pixels;
            if (copies) {
                float* own = copies + (parts == 1 ? thread : b) * padded;
                for (int64_t c = 0; c < s.channels && parts == 1; ++c)
                    pad_channel(layer, image + c * pixels, own + c * s.height * s.width);
                image = own;
            }
            const bool more = parts == 1 && unit + 1 < end;
            const float* ahead = more ? x + (b + 1) * s.channels * pixels : nullptr;
            run_part(plan, image, ahead, plan.y + b * y_image, part_start(all, parts, part),
                     part_start(all, parts, part + 1), accumulate, streams, parts == 1);
        }
#if ECE408_STREAMS
        stream_fence();
#endif
    });
    return true;
}

bool run_windows(const Layer& layer, const float* x, const float* packed,
                 const ece408_epilogue& epilogue, float* y, bool streams, bool accumulate,
                 int threads) {
    const Shape& s = layer.shape;
    Plan plan = {layer, s, Tiling(s), packed, epilogue, y};
    return make_tiling(s.out_height, s.out_width, s.width, &plan.tiling) &&
           run(plan, x, streams, accumulate, threads);
}

// `packed`: the layer's packed weights, or null.
int run_layer(const Layer& layer, const float* x, const float* bias, const float* packed,
              const ece408_epilogue& epilogue, float* y, bool accumulate, int threads) {
    const bool streams = is_streamed(layer.shape, accumulate, threads);
    const bool is_1x1 = layer.shape.kernel_h * layer.shape.kernel_w == 1 &&
                            !(streams && layer.as_it_is());
    Buffer<float> own;
    if (!packed && (!is_1x1 || is_worth_packing(layer.shape, threads))) {
        own = Buffer<float>(packed_floats(layer.shape));
        if (!own) return ECE408_NO_MEMORY;
        pack_weights(layer, bias, own, threads);
        packed = own;
    }
    const bool has_memory =
        is_1x1 ? run_conv_1x1(layer, x, bias, packed, epilogue, y, accumulate, threads)
                   : run_windows(layer, x, packed, epilogue, y, streams, accumulate, threads);
    return has_memory ? ECE408_OK : ECE408_NO_MEMORY;
}

bool can_take(const ece408_problem& problem, const float* w) {
    const bool border = problem.pad_h > 0 || problem.pad_w > 0;
    return !border || all_finite(w, weights(problem));
}

int forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
            float* y, bool accumulate, int threads) {
    if (!can_take(problem, w)) return kNotFinite;
    return run_layer(forward_layer(problem, w), x, bias, nullptr, {}, y, accumulate, threads);
}

int64_t forward_packed_floats(const ece408_problem& problem) {
    return packed_floats(forward_layer(problem, nullptr).shape);
}

int pack(const ece408_problem& problem, const float* w, const float* bias, float* packed,
         int threads) {
    if (!can_take(problem, w)) return kNotFinite;
    pack_weights(forward_layer(problem, w), bias, packed, threads);
    return ECE408_OK;
}

int forward_packed(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                   const float* packed, const ece408_epilogue& epilogue, float* y, int threads) {
    if (!packed && !can_take(problem, w)) return kNotFinite;
    return run_layer(forward_layer(problem, w), x, bias, packed, epilogue, y, false, threads);
}

// Stores a channel of the gradient for the selected pixels among zeros for the others.
void spread_channel(const Shape& s, const float* from, float* to, bool accumulate) {
    for (int64_t y = 0; y < s.height; ++y, to += s.width) {
        const bool picked = y % s.stride_h == 0;
        if (!accumulate) memset(to, 0, static_cast<size_t>(s.width) * sizeof(float));
        if (!picked) continue;
        for (int64_t x = 0; x < s.out_width; ++x) to[x * s.stride_w] += from[x];
        from += s.out_width;
    }
}

// The gradient for x of a 1x1 kernel with strides: computes it for the selected pixels of some
// images at a time, which stay in the caches, then stores it among zeros.
int spread_backward(const ece408_problem& problem, const float* w, const float* dy, float* dx,
                    bool accumulate, int threads) {
    const Shape s = derive(problem);
    const int64_t met = s.out_height * s.out_width, pixels = s.height * s.width;
    const int64_t most = kSpreadFloats / (s.channels * met);
    const int64_t images_at_once = most < 1 ? 1 : most < s.batch ? most : s.batch;
    const Buffer<float> memory(images_at_once * s.channels * met);
    if (!memory) return ECE408_NO_MEMORY;
    const float* const found = memory;
    ece408_problem some = problem;
    for (int64_t first = 0; first < s.batch; first += images_at_once) {
        some.batch = s.batch - first < images_at_once ? s.batch - first : images_at_once;
        const int status = run_layer(backward_layer(some, w), dy + first * s.filters * met, nullptr,
                                     nullptr, {},
                                     memory, false, threads);
        if (status != ECE408_OK) return status;
        parallel_for(threads, some.batch * s.channels, [&](int64_t c, int) {
            spread_channel(s, found + c * met, dx + (first * s.channels + c) * pixels, accumulate);
        });
    }
    return ECE408_OK;
}

int backward_data(const ece408_problem& problem, const float* w, const float* dy, float* dx,
                  bool accumulate, int threads) {
    if (is_flat(problem) && (problem.stride_h > 1 || problem.stride_w > 1))
        return spread_backward(problem, w, dy, dx, accumulate, threads);
    if (!is_flat(problem) && !all_finite(w, weights(problem))) return kNotFinite;
    return run_layer(backward_layer(problem, w), dy, nullptr, nullptr, {}, dx, accumulate, threads);
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(direct) = {
    {forward, backward_data, nullptr}, {}, {},
    forward_packed_floats, pack, forward_packed};

}  // namespace ece408
