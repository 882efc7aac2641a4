// Convolutions with stride 1, dilation 1, one group and output rows of at least a vector, and of
// single taps with any stride, forward and the gradient for x: what surrounds the register tile of
// tile.h. It is compiled once per instruction set, with ECE408_ISA its name and ECE408_LANES the floats
// in one of its vectors, and only the constant at the end is not local.
//
// Weights are packed for the tile, but for kernels of a single tap, for which that would take as
// long as a small plane's products. Those see an image without a border as one row.
//
// The tile knows no padding: an image that has some is copied with its border first; of an image
// that a single tap strides over, the pixels that it meets are, and gradients for those are put among
// zeros. The gradient for x is such a convolution of dy, with the kernel turned round and channels and
// filters swapped. A border's zeros are multiplied like pixels, so other kernels compute with weights
// that are not all finite.
//
// An image's work is a list of tiles, filter block by filter block, and within one along the flat
// output plane; for a single tap, whose images have many channels, a chunk of pixels after the other,
// each filter block by filter block. Threads take whole images, or, of few images, stretches of that
// list. Each tile asks for a few lines of what its thread will read next: processors fetch ahead within
// a page, and such an image is a few pages.
#include "kernels.h"

#include <string.h>

#include "buffer.h"
#include "lanes.h"
#include "plane.h"
#include "team.h"
#include "tile.h"

namespace ece408 {
namespace {

// Layers whose sums are this short write so much per product that output bound for memory goes
// past the caches: a line that the caches take in would be read before it is overwritten.
constexpr int64_t kStreamedTaps = 72;

// Of a single tap: floats of an image of x that the second cache holds, and of a chunk of a larger one,
// for the first cache, and a chunk's pixels at most; and floats of the gradients for pixels that strides
// pick.
constexpr bool kShortVectors = kLanes <= 8;
constexpr int64_t kImageFloats = 1 << 16, kSpreadFloats = 1 << 20;
constexpr int64_t kChunkFloats = kShortVectors ? 6 << 10 : 4 << 10;
constexpr int64_t kChunkPixels = kShortVectors ? 128 : 256;

// Filter blocks, and channels of an image that the second cache holds and of a larger one, from which on
// it is worth it to lay pixels out: where channels do not begin with cache lines; with short vectors
// always, as channels that lie a large plane apart meet in few sets of the first cache.
constexpr int64_t kLaidOutBlocks = 12, kLaidOutChannels = 96;
constexpr int64_t kLaidOutOfLarge = kShortVectors ? 64 : kLaidOutChannels;

struct Plan {
    Layer layer;
    Shape shape;  // the layer's
    Tiling tiling;
    const float* bias;
    ece408_finish finish;  // without factors: nothing
    float* y;
    Buffer<float> packed;  // null for a single tap
    int64_t chunk;         // tiles of a plane that all filter blocks take before the next ones
    // Where vectors lie in an image whose tiles are laid out one after the other, each as
    // [c][vector of tile][lane]; null if tiles stay where they are.
    Buffer<int64_t> places;

    bool single_tap() const { return shape.kernel_h * shape.kernel_w == 1; }
    int64_t chunks() const { return divide_up(tiling.tiles, chunk); }
    // Floats of a channel in a tile that is laid out, and of all channels.
    int64_t tile_row() const { return (tiling.size + 1) * kLanes; }
    int64_t tile_floats() const { return shape.channels * tile_row(); }
};

int64_t taps(const Shape& s) { return s.channels * s.kernel_h * s.kernel_w; }

// Filter block after filter block: its biases, then its weights as [c][p][q][filter of block].
void pack_weights(const Plan& plan) {
    const Shape& s = plan.shape;
    float* next = plan.packed;
    for (int64_t block = 0; block < plan.tiling.blocks; ++block) {
        const int64_t begin = plan.tiling.first_filter(block);
        const int64_t end = plan.tiling.first_filter(block + 1);
        for (int64_t m = begin; m < end; ++m) *next++ = plan.bias ? plan.bias[m] : 0.0f;
        for (int64_t c = 0; c < s.channels; ++c)
            for (int64_t p = 0; p < s.kernel_h; ++p)
                for (int64_t q = 0; q < s.kernel_w; ++q)
                    for (int64_t m = begin; m < end; ++m) *next++ = plan.layer.weight(m, c, p, q);
    }
}

// Moves the results of vectors from scratch to the output, only the lanes that are their own.
void put(const Plan& plan, const ece408_finish& finish, float* scratch, float* y, int64_t filters,
         int64_t begin, int64_t end, bool accumulate) {
    const Tiling& tiling = plan.tiling;
    for (int64_t m = 0; m < filters; ++m)
        for (int64_t v = begin; v < end; ++v, scratch += kLanes) {
            const int64_t at = m * tiling.plane + tiling.out[v];
            if (finish.factors) store(scratch, Finish(finish)(m, at, load(scratch)));
            float* to = y + at;
            const int first = v == tiling.count - 1 ? tiling.first : 0;
            for (int lane = first; lane < kLanes; ++lane)
                to[lane] = accumulate ? to[lane] + scratch[lane] : scratch[lane];
        }
}

// Some tiles of one filter block of one image.
struct Stretch {
    const Plan& plan;
    StripArgs args;
    const int64_t* in;  // where vectors lie in x
    int64_t filters;
    float* y;  // of the block

    // `ahead`: the image that this thread is likely to read next, or null.
    Stretch(const Plan& plan, const float* x, const float* ahead, float* image_y, int64_t block)
        : plan(plan), in(plan.tiling.in) {
        const Shape& s = plan.shape;
        const int64_t plane = plan.tiling.plane, m = plan.tiling.first_filter(block);
        filters = plan.tiling.first_filter(block + 1) - m;
        y = image_y + m * plane;
        const Layer& layer = plan.layer;
        args = {};
        args.channels = s.channels, args.height = s.height, args.width = s.width;
        args.kernel_h = s.kernel_h, args.kernel_w = s.kernel_w;
        args.x = x, args.y = y, args.filter_step = plane;
        args.finish = finish_from(plan.finish, m, y - plan.y);
        args.ahead_lines = 1, args.ahead_step = kLine;
        if (ahead) {
            const int64_t lines = divide_up(s.channels * layer.height * layer.width, kLine);
            args.ahead_runs = divide_up(lines, plan.tiling.all());
            args.ahead = ahead + block * plan.tiling.tiles * args.ahead_runs * kLine;
        }
        if (!plan.single_tap()) {
            args.packed = plan.packed + m * (1 + taps(s));
            return;
        }
        args.bias = plan.bias ? plan.bias + m : nullptr;
        args.weight_step = layer.turned ? 1 : s.channels;
        args.channel_step = layer.turned ? s.filters : 1;
        args.weights = layer.weights + m * args.weight_step;
    }

    // Takes pixels from tiles that are laid out, of which tile `first` is at `tiles`.
    void take_laid_out(const float* tiles, int64_t first) {
        args.x = tiles - first * plan.tile_floats();
        args.height = 1, args.width = plan.tile_row();
        in = plan.places;
    }

    void set(int64_t vector, int64_t tiles) {
        args.in = in + vector;
        args.out = plan.tiling.out + vector;
        args.split = plan.tiling.split + vector;
        args.tiles = tiles;
    }

    template <bool Stream>
    typename Strip<Stream, false>::Function* pick_strip(int64_t vectors) const {
        const int tall = static_cast<int>(filters), wide = static_cast<int>(vectors);
        return plan.single_tap() ? pick_filters<Strip<Stream, true>, 1>(tall, wide)
                                 : pick_tile<Strip<Stream, false>>(args.kernel_w, tall, wide);
    }

    template <bool Stream>
    void strip_of(int64_t begin, int64_t end, int64_t vectors) {
        if (begin >= end) return;
        set(plan.tiling.first_vector(begin), end - begin);
        args.head = begin == 0;
        pick_strip<Stream>(vectors)(args);
        args.ahead += args.tiles * args.ahead_runs * args.ahead_step;
    }

    template <bool Stream>
    void run(int64_t begin, int64_t end) {
        const int64_t wide = plan.tiling.wide, size = plan.tiling.size;
        const int64_t turn = wide < begin ? begin : wide < end ? wide : end;
        strip_of<Stream>(begin, turn, size + 1);
        strip_of<Stream>(turn, end, size);
    }

    // Tile by tile by way of a scratch array: for tiles that may not simply overwrite what lies
    // under their vectors.
    void run_apart(int64_t begin, int64_t end, bool accumulate) {
        float scratch[kMaxFilters * 4 * kLanes];
        const ece408_finish finish = args.finish;
        static const int64_t places[4] = {0, kLanes, 2 * kLanes, 3 * kLanes};
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t first = plan.tiling.first_vector(tile);
            const int64_t last = plan.tiling.first_vector(tile + 1);
            set(first, 1);
            args.y = scratch;
            args.out = places;
            args.filter_step = (last - first) * kLanes;
            args.finish = {};
            pick_strip<false>(last - first)(args);
            put(plan, finish, scratch, y, filters, first, last, accumulate);
        }
    }

    // The whole plane, past the caches, but for the last tile, whose first lanes may be others'
    // too: those are written twice, with the same values.
    void run_streamed() {
#if ECE408_STREAMS
        alignas(64) float carried[kMaxFilters * kLanes] = {};
        args.carried = carried;
        const int64_t last = plan.tiling.tiles - 1;
        run<true>(0, last);
        const int64_t out = plan.tiling.first_vector(last) * kLanes;
        for (int64_t m = 0; m < filters && last > 0; ++m)
            finish_stream(y + m * args.filter_step, out, carried + m * kLanes);
        run<false>(last, last + 1);
#endif
    }
};

// `whole`: the image is one thread's.
void run_tiles(Stretch* stretch, int64_t begin, int64_t end, bool accumulate, bool whole) {
    if (accumulate) return stretch->run_apart(begin, end, true);
    const Tiling& tiling = stretch->plan.tiling;
    // Threads must not meet on the lanes that two vectors share; one thread writes them twice.
    const bool apart = !whole && end == tiling.tiles && tiling.first > 0;
    stretch->run<false>(begin, end - apart);
    if (apart) stretch->run_apart(end - 1, end, false);
}

// A channel of an image into the middle of zeros.
void pad_channel(const Layer& layer, const float* from, float* to) {
    const int64_t row = layer.shape.width;
    memset(to, 0, static_cast<size_t>(layer.shape.height * row) * sizeof(float));
    for (int64_t y = 0; y < layer.height; ++y)
        memcpy(to + (layer.top + y) * row + layer.left, from + y * layer.width,
               static_cast<size_t>(layer.width) * sizeof(float));
}

// The pixels of a channel that the strides pick, one after the other.
void pick_channel(const Layer& layer, const float* from, float* to) {
    const int64_t step = layer.stride_w, columns = divide_up(layer.width, step);
    for (int64_t y = 0; y < layer.height; y += layer.stride_h, to += columns) {
        const float* row = from + y * layer.width;
        if (step == 2)  // as the compiler has vectors for
            for (int64_t x = 0; x < columns; ++x) to[x] = row[2 * x];
        else
            for (int64_t x = 0; x < columns; ++x) to[x] = row[step * x];
    }
}

void lay_out_channel(const Layer& layer, const float* from, float* to) {
    if (layer.stride_h > 1 || layer.stride_w > 1)
        pick_channel(layer, from, to);
    else
        pad_channel(layer, from, to);
}

// What a chunk's tiles ask for: the pixels of the next one, of all channels, or of the next image's
// first one.
void ask_for_next_chunk(const Plan& plan, const float* x, const float* ahead, int64_t chunk,
                        int64_t block, StripArgs* args) {
    const Tiling& tiling = plan.tiling;
    const int64_t next = chunk + 1 < plan.chunks() ? chunk + 1 : 0;
    const float* image = next > 0 ? x : ahead;
    if (!image) return;
    const int64_t tiles = tiling.tiles - next * plan.chunk;
    const int64_t count = tiles < plan.chunk ? tiles : plan.chunk;
    const int64_t first = tiling.first_vector(next * plan.chunk);
    const int64_t pixels = (tiling.first_vector(next * plan.chunk + count) - first) * kLanes;
    const int64_t channels = plan.shape.channels, asking = tiling.blocks * plan.chunk;
    // All blocks' tiles together ask for all channels.
    args->ahead_lines = divide_up(pixels, kLine);
    args->ahead_step = plan.shape.height * plan.shape.width;
    args->ahead_runs = divide_up(channels, asking);
    args->ahead = image + first * kLanes + block * plan.chunk * args->ahead_runs * args->ahead_step;
}

// Tiles [begin, end) of an image laid out one after the other: a thread that reads them again and again,
// for each filter block, reads whole cache lines in order.
void lay_out_tiles(const Plan& plan, const float* x, int64_t begin, int64_t end, float* to) {
    const Tiling& tiling = plan.tiling;
    const int64_t plane = plan.shape.height * plan.shape.width;
    for (int64_t tile = begin; tile < end; ++tile, to += plan.tile_floats()) {
        const int64_t first = tiling.first_vector(tile), last = tiling.first_vector(tile + 1);
        float* row = to;
        for (int64_t c = 0; c < plan.shape.channels; ++c, row += plan.tile_row())
            for (int64_t v = first; v < last; ++v)
                store(row + (v - first) * kLanes, load(x + c * plane + tiling.in[v]));
    }
}

// The same for a single tap: all filter blocks take a chunk of tiles, whose pixels stay in a cache, and
// then the next one. Cells [begin, end) are those of a chunk and a block each. `tiles`, if not null, is
// where a chunk is laid out, which is done here with `fills`.
void run_cells(const Plan& plan, const float* x, const float* ahead, float* y, int64_t begin,
               int64_t end, float* tiles, bool fills, bool accumulate, bool whole) {
    const Tiling& tiling = plan.tiling;
    for (int64_t cell = begin; cell < end; ++cell) {
        const int64_t chunk = cell / tiling.blocks, block = cell % tiling.blocks;
        const int64_t first = chunk * plan.chunk;
        const int64_t last = first + plan.chunk < tiling.tiles ? first + plan.chunk : tiling.tiles;
        if (tiles && fills && (cell == begin || block == 0))
            lay_out_tiles(plan, x, first, last, tiles);
        Stretch stretch(plan, x, nullptr, y, block);
        if (tiles) stretch.take_laid_out(tiles, first);
        ask_for_next_chunk(plan, x, ahead, chunk, block, &stretch.args);
        run_tiles(&stretch, first, last, accumulate, whole);
    }
}

// The tiles [begin, end) of an image, numbered through its filter blocks.
void run_part(const Plan& plan, const float* x, const float* ahead, float* y, int64_t begin,
              int64_t end, bool accumulate, bool streams, bool whole) {
    int64_t next = 0;
    for (int64_t tile = begin; tile < end; tile = next) {
        const int64_t of_block = plan.tiling.tiles;
        const int64_t block = tile / of_block, start = block * of_block;
        next = start + of_block < end ? start + of_block : end;
        Stretch stretch(plan, x, ahead, y, block);
        if (streams)
            stretch.run_streamed();
        else
            run_tiles(&stretch, tile - start, next - start, accumulate, whole);
    }
}

// Whole images are laid out per thread, images in parts once for all. False without memory.
bool run(const Plan& plan, const float* x, bool accumulate, int threads) {
    const Shape& s = plan.shape;
    const Layer& layer = plan.layer;
    const int64_t pixels = layer.height * layer.width;
    const int64_t y_image = s.filters * plan.tiling.plane;
    const bool short_sums = ECE408_STREAMS && !accumulate && taps(s) <= kStreamedTaps &&
                            exceeds_caches(4 * s.batch * y_image);
    const bool streams = short_sums && count_parts(s.batch, plan.tiling.all(), threads) == 1;
    const bool cells = plan.single_tap() && !streams;
    const int64_t all = cells ? plan.tiling.blocks * plan.chunks() : plan.tiling.all();
    const int64_t parts = count_parts(s.batch, all, threads);
    const int64_t units = s.batch * parts, padded = s.channels * s.height * s.width;
    const int team = static_cast<int>(threads < units ? threads : units);
    const int64_t of_chunk = plan.chunk * plan.tile_floats();
    const bool once = plan.chunks() == 1 && parts > 1;  // an image's tiles, for all threads
    Buffer<float> laid_out;
    if (cells && plan.places) {
        laid_out = Buffer<float>((once ? s.batch : team) * of_chunk);
        if (!laid_out) return false;
    }
    Buffer<float> memory;
    if (!layer.as_it_is()) {
        memory = Buffer<float>((parts == 1 ? team : s.batch) * padded);
        if (!memory) return false;
    }
    float* const copies = memory;
    if (copies && parts > 1)
        share(team, s.batch * s.channels, [&](int64_t c, int) {
            lay_out_channel(layer, x + c * pixels, copies + c * s.height * s.width);
        });
    if (laid_out && once)
        share(team, s.batch * plan.tiling.tiles, [&](int64_t number, int) {
            const int64_t b = number / plan.tiling.tiles, tile = number % plan.tiling.tiles;
            const float* image = copies ? copies + b * padded : x + b * s.channels * pixels;
            float* to = laid_out + number * plan.tile_floats();
            lay_out_tiles(plan, image, tile, tile + 1, to);
        });
    share_runs(team, units, [&](int64_t begin, int64_t end, int member) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t b = unit / parts, part = unit % parts;
            const float* image = x + b * s.channels * pixels;
            if (copies) {
                float* own = copies + (parts == 1 ? member : b) * padded;
                for (int64_t c = 0; c < s.channels && parts == 1; ++c)
                    lay_out_channel(layer, image + c * pixels, own + c * s.height * s.width);
                image = own;
            }
            const bool more = parts == 1 && unit + 1 < end;
            const float* ahead = more ? x + (b + 1) * s.channels * pixels : nullptr;
            const int64_t first = part_start(all, parts, part);
            const int64_t last = part_start(all, parts, part + 1);
            float* to = plan.y + b * y_image;
            float* const tiles = laid_out ? laid_out + (once ? b : member) * of_chunk : nullptr;
            if (cells)
                run_cells(plan, image, copies ? nullptr : ahead, to, first, last, tiles, !once,
                          accumulate, parts == 1);
            else
                run_part(plan, image, ahead, to, first, last, accumulate, streams, parts == 1);
        }
#if ECE408_STREAMS
        finish_streams();
#endif
    });
    return true;
}

// False without memory.
bool find_places(Plan* plan) {
    const Tiling& tiling = plan->tiling;
    plan->places = Buffer<int64_t>(tiling.count);
    if (!plan->places) return false;
    for (int64_t tile = 0; tile < tiling.tiles; ++tile) {
        const int64_t first = tiling.first_vector(tile), last = tiling.first_vector(tile + 1);
        for (int64_t v = first; v < last; ++v)
            plan->places[v] = tile * plan->tile_floats() + (v - first) * kLanes;
    }
    return true;
}

int run_layer(const Layer& layer, const float* x, const float* bias, const ece408_finish& finish,
              float* y, bool accumulate, int threads) {
    const Shape& s = layer.shape;
    Plan plan = {layer, s, {}, bias, finish, y, {}, 1, {}};
    if (!make_tiling(s.out_height, s.out_width, s.width, s.filters, &plan.tiling))
        return ECE408_NO_MEMORY;
    if (!plan.single_tap()) {
        plan.packed = Buffer<float>(s.filters * (1 + taps(s)));
        if (!plan.packed) return ECE408_NO_MEMORY;
        pack_weights(plan);
    } else {
        plan.chunk = plan.tiling.tiles;
        int64_t least_channels = kLaidOutChannels;
        if (s.channels * s.height * s.width > kImageFloats) {
            least_channels = kLaidOutOfLarge;
            const int64_t most = kChunkFloats / s.channels;
            const int64_t pixels = most < kChunkPixels ? most : kChunkPixels;
            plan.chunk = pixels / (kLanes * (plan.tiling.size + (plan.tiling.wide > 0)));
            if (plan.chunk < 1) plan.chunk = 1;
        }
        const bool worth_it = (kShortVectors || plan.tiling.plane % kLine != 0) &&
                              s.channels >= least_channels && plan.tiling.blocks >= kLaidOutBlocks;
        if (worth_it && !find_places(&plan)) return ECE408_NO_MEMORY;
    }
    return run(plan, x, accumulate, threads) ? ECE408_OK : ECE408_NO_MEMORY;
}

int run_forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                const ece408_finish& finish, float* y, bool accumulate, int threads) {
    const bool border = problem.pad_h > 0 || problem.pad_w > 0;
    if (border && !all_finite(w, weights(problem))) return kNotFinite;
    return run_layer(forward_layer(problem, w), x, bias, finish, y, accumulate, threads);
}

int forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
            float* y, bool accumulate, int threads) {
    return run_forward(problem, x, w, bias, {}, y, accumulate, threads);
}

int finished(const ece408_problem& problem, const float* x, const float* w, const float* bias,
             const ece408_finish& finish, float* y, int threads) {
    return run_forward(problem, x, w, bias, finish, y, false, threads);
}

// A channel of the gradient for pixels that strides pick becomes one for all of them.
void spread_channel(const Shape& s, const float* from, float* to, bool accumulate) {
    for (int64_t y = 0; y < s.height; ++y, to += s.width) {
        const bool picked = y % s.stride_h == 0;
        if (!accumulate) memset(to, 0, static_cast<size_t>(s.width) * sizeof(float));
        if (!picked) continue;
        for (int64_t x = 0; x < s.out_width; ++x) to[x * s.stride_w] += from[x];
        from += s.out_width;
    }
}

// The gradient for x of a single tap with strides: that for the pixels which are met, of some images
// at a time, which stay in the caches, and then in its place among zeros.
int spread_backward(const ece408_problem& problem, const float* w, const float* dy, float* dx,
                    bool accumulate, int threads) {
    const Shape s = derive(problem);
    const int64_t met = s.out_height * s.out_width, pixels = s.height * s.width;
    const int64_t most = kSpreadFloats / (s.channels * met);
    const int64_t together = most < 1 ? 1 : most < s.batch ? most : s.batch;
    const Buffer<float> memory(together * s.channels * met);
    if (!memory) return ECE408_NO_MEMORY;
    const float* const found = memory;
    ece408_problem some = problem;
    for (int64_t first = 0; first < s.batch; first += together) {
        some.batch = s.batch - first < together ? s.batch - first : together;
        const int status = run_layer(backward_layer(some, w), dy + first * s.filters * met, nullptr, {},
                                     memory, false, threads);
        if (status != ECE408_OK) return status;
        share(threads, some.batch * s.channels, [&](int64_t c, int) {
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
    return run_layer(backward_layer(problem, w), dy, nullptr, {}, dx, accumulate, threads);
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(direct) = {
    {forward, backward_data, nullptr}, {}, {}, {}, finished};

}  // namespace ece408
