// Convolutions with stride 1, dilation 1, one group and output rows of at least a vector, forward
// and the gradient for x: what surrounds the register tile of tile.h. It is compiled once per
// instruction set, with ECE408_ISA its name and ECE408_LANES the floats in one of its vectors, and
// only the functions at the end are not local.
//
// The tile knows no padding: an image that has some is copied with its border first. The gradient
// for x is such a convolution of dy, with the kernel turned round and channels and filters swapped.
//
// An image's work is a list of tiles, filter block by filter block, and within one along the flat
// output plane. Threads take whole images, or, of few images, stretches of that list.
#include "direct.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "shape.h"
#include "tile.h"

namespace ece408 {
namespace {

// Layers whose sums are this short write so much per product that output bound for memory goes
// past the caches: a line that the caches take in would be read before it is overwritten.
constexpr int64_t kStreamedTaps = 64;

// The output plane, one flat run, cut into vectors. The last one is moved back to end with the
// plane, so its first `first` lanes are its neighbour's.
struct Vectors {
    int64_t count;
    int64_t* in;
    int64_t* out;
    int* split;
    int first;  // of the last vector
};

// A convolution of padded images: shape.height and shape.width are those with the border.
struct Layer {
    Shape shape;
    int64_t height, width, top, left;  // of the image in it
    const float* weights;
    bool turned;  // weights are (channels, filters, ...), the kernel turned round

    bool padded() const { return height != shape.height || width != shape.width; }
    float weight(int64_t m, int64_t c, int64_t p, int64_t q) const {
        if (!turned)
            return weights[((m * shape.channels + c) * shape.kernel_h + p) * shape.kernel_w + q];
        const int64_t row = (c * shape.filters + m) * shape.kernel_h + shape.kernel_h - 1 - p;
        return weights[row * shape.kernel_w + shape.kernel_w - 1 - q];
    }
};

struct Plan {
    Layer layer;
    Shape shape;  // the layer's
    Vectors vectors;
    float* packed;
    int64_t blocks;  // of filters
    // The tiles of a block: `wide` of `size` + 1 vectors, then the others of `size`.
    int64_t tiles, size, wide;
    bool streams;
    void* memory;
};

// Whether so many floats are more than a core's share of the last cache, so that they will not be
// there any more when they are read.
bool exceeds_caches(int64_t floats) {
    return floats * static_cast<int64_t>(sizeof(float)) > int64_t{32} << 20;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `part` begins when `total` things are cut into `parts` as even as can be.
int64_t part_start(int64_t total, int64_t parts, int64_t part) { return total * part / parts; }

int64_t taps(const Shape& s) { return s.channels * s.kernel_h * s.kernel_w; }

Layer forward_layer(const ece408_problem& problem, const float* w) {
    ece408_problem p = problem;
    // Without a window to slide, an image is one row of pixels.
    if (p.kernel_h == 1 && p.kernel_w == 1 && p.pad_h == 0 && p.pad_w == 0) {
        p.width *= p.height;
        p.height = 1;
    }
    Layer layer = {derive(p), p.height, p.width, p.pad_h, p.pad_w, w, false};
    layer.shape.height += 2 * p.pad_h;
    layer.shape.width += 2 * p.pad_w;
    return layer;
}

Layer backward_layer(const ece408_problem& problem, const float* w) {
    const Shape s = derive(problem);
    Layer layer = {s, s.out_height, s.out_width, s.kernel_h - 1 - s.pad_h,
                   s.kernel_w - 1 - s.pad_w, w, true};
    layer.shape.channels = s.filters;
    layer.shape.filters = s.channels;
    layer.shape.height = s.height + s.kernel_h - 1;
    layer.shape.width = s.width + s.kernel_w - 1;
    layer.shape.out_height = s.height;
    layer.shape.out_width = s.width;
    return layer;
}

void fill_vectors(const Shape& s, Vectors* vectors) {
    const int64_t plane = s.out_height * s.out_width;
    vectors->first = static_cast<int>(vectors->count * kLanes - plane);
    for (int64_t v = 0; v < vectors->count; ++v) {
        const int64_t start = v < vectors->count - 1 ? v * kLanes : plane - kLanes;
        const int64_t row = start / s.out_width, column = start % s.out_width;
        const int64_t left = s.out_width - column;
        vectors->in[v] = row * s.width + column;
        vectors->out[v] = start;
        vectors->split[v] = static_cast<int>(left < kLanes ? left : kLanes);
    }
}

// Cycles of a tile for one tap, as multiply-adds that keep one unit busy: at least what loads its
// operands and what hides the latency of a sum, and a share of its start and end.
int64_t tile_cost(int64_t filters, int64_t vectors) {
    int64_t cost = filters * vectors;
    const int64_t loads = filters + 2 * vectors, latency = 8;
    if (cost < loads) cost = loads;
    if (cost < latency) cost = latency;
    return cost + 2;
}

// The blocks of filters that make a plane cheapest.
int64_t choose_blocks(int64_t filters) {
    int64_t best = 0, best_cost = 0;
    for (int64_t most = kMaxFilters; most > 0; --most) {
        const int64_t blocks = divide_up(filters, most), large = divide_up(filters, blocks);
        const int64_t vectors = most_vectors(static_cast<int>(large));
        // Of 12 vectors, which every tile's size divides.
        const int64_t cost = blocks * tile_cost(large, vectors) * 12 / vectors;
        if (best == 0 || cost < best_cost) {
            best = blocks;
            best_cost = cost;
        }
    }
    return best;
}

// Filter block after filter block: its biases, then its weights as [c][p][q][filter of block].
void pack_weights(const Plan& plan, const float* bias) {
    const Shape& s = plan.shape;
    float* next = plan.packed;
    for (int64_t block = 0; block < plan.blocks; ++block) {
        const int64_t begin = part_start(s.filters, plan.blocks, block);
        const int64_t end = part_start(s.filters, plan.blocks, block + 1);
        for (int64_t m = begin; m < end; ++m) *next++ = bias ? bias[m] : 0.0f;
        for (int64_t c = 0; c < s.channels; ++c)
            for (int64_t p = 0; p < s.kernel_h; ++p)
                for (int64_t q = 0; q < s.kernel_w; ++q)
                    for (int64_t m = begin; m < end; ++m) *next++ = plan.layer.weight(m, c, p, q);
    }
}

// False if there is no memory. The caller frees plan->memory.
bool make_plan(const Layer& layer, const float* bias, Plan* plan) {
    plan->layer = layer;
    plan->shape = layer.shape;
    const Shape& s = plan->shape;
    const int64_t count = divide_up(s.out_height * s.out_width, kLanes);
    const size_t packed_floats = static_cast<size_t>(s.filters * (1 + taps(s)));
    const size_t per_vector = 2 * sizeof(int64_t) + sizeof(int);
    plan->memory = malloc(static_cast<size_t>(count) * per_vector + packed_floats * sizeof(float));
    if (!plan->memory) return false;
    plan->vectors.count = count;
    plan->vectors.in = static_cast<int64_t*>(plan->memory);
    plan->vectors.out = plan->vectors.in + count;
    plan->vectors.split = reinterpret_cast<int*>(plan->vectors.out + count);
    plan->packed = reinterpret_cast<float*>(plan->vectors.split + count);
    plan->blocks = choose_blocks(s.filters);
    plan->tiles =
        divide_up(count, most_vectors(static_cast<int>(divide_up(s.filters, plan->blocks))));
    plan->size = count / plan->tiles;
    plan->wide = count % plan->tiles;
    fill_vectors(s, &plan->vectors);
    pack_weights(*plan, bias);
    return true;
}

int64_t first_vector(const Plan& plan, int64_t tile) {
    return tile * plan.size + (tile < plan.wide ? tile : plan.wide);
}

// Moves the results of vectors from scratch to the output, only the lanes that are their own.
void put(const Plan& plan, const float* scratch, float* y, int64_t filters, int64_t begin,
         int64_t end, bool accumulate) {
    const Vectors& vectors = plan.vectors;
    const int64_t plane = plan.shape.out_height * plan.shape.out_width;
    for (int64_t m = 0; m < filters; ++m)
        for (int64_t v = begin; v < end; ++v, scratch += kLanes) {
            float* to = y + m * plane + vectors.out[v];
            const int first = v == vectors.count - 1 ? vectors.first : 0;
            for (int lane = first; lane < kLanes; ++lane)
                to[lane] = accumulate ? to[lane] + scratch[lane] : scratch[lane];
        }
}

// Some tiles of one filter block of one image.
struct Stretch {
    const Plan& plan;
    StripArgs args;
    int64_t filters;
    float* y;  // of the block

    Stretch(const Plan& plan, const float* x, float* image_y, int64_t block) : plan(plan) {
        const Shape& s = plan.shape;
        const int64_t m = part_start(s.filters, plan.blocks, block);
        filters = part_start(s.filters, plan.blocks, block + 1) - m;
        const int64_t plane = s.out_height * s.out_width;
        y = image_y + m * plane;
        args = {s.channels, s.height, s.width, s.kernel_h, s.kernel_w, x,
                plan.packed + m * (1 + taps(s)), 0, nullptr, nullptr, y, nullptr, plane,
                false, nullptr};
    }

    void set(int64_t vector, int64_t tiles) {
        args.in = plan.vectors.in + vector;
        args.out = plan.vectors.out + vector;
        args.split = plan.vectors.split + vector;
        args.tiles = tiles;
    }

    template <bool Stream>
    void strip_of(int64_t begin, int64_t end, int64_t vectors) {
        if (begin >= end) return;
        set(first_vector(plan, begin), end - begin);
        args.head = begin == 0;
        pick_strip<Stream>(args.kernel_w, static_cast<int>(filters),
                           static_cast<int>(vectors))(args);
    }

    template <bool Stream>
    void run(int64_t begin, int64_t end) {
        const int64_t turn = plan.wide < begin ? begin : plan.wide < end ? plan.wide : end;
        strip_of<Stream>(begin, turn, plan.size + 1);
        strip_of<Stream>(turn, end, plan.size);
    }

    // Tile by tile by way of a scratch array: for tiles that may not simply overwrite what lies
    // under their vectors.
    void run_apart(int64_t begin, int64_t end, bool accumulate) {
        float scratch[kMaxFilters * 4 * kLanes];
        static const int64_t places[4] = {0, kLanes, 2 * kLanes, 3 * kLanes};
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t first = first_vector(plan, tile), last = first_vector(plan, tile + 1);
            set(first, 1);
            StripArgs apart = args;
            apart.y = scratch;
            apart.out = places;
            apart.filter_step = (last - first) * kLanes;
            pick_strip<false>(args.kernel_w, static_cast<int>(filters),
                              static_cast<int>(last - first))(apart);
            put(plan, scratch, y, filters, first, last, accumulate);
        }
    }

    // The whole plane, past the caches, but for the last tile.
    void run_streamed() {
#if ECE408_STREAMS
        alignas(64) float carried[kMaxFilters * kLanes] = {};
        args.carried = carried;
        run<true>(0, plan.tiles - 1);
        const int64_t out = first_vector(plan, plan.tiles - 1) * kLanes;
        for (int64_t m = 0; m < filters && plan.tiles > 1; ++m)
            finish_stream(y + m * args.filter_step, out, carried + m * kLanes);
        run_apart(plan.tiles - 1, plan.tiles, false);
#endif
    }
};

// `whole`: the image is one thread's.
void run_tiles(const Plan& plan, const float* x, float* y, int64_t block, int64_t begin,
               int64_t end, bool accumulate, bool whole) {
    Stretch stretch(plan, x, y, block);
    if (accumulate) return stretch.run_apart(begin, end, true);
    // Threads must not meet on the lanes that two vectors share; one thread writes them twice.
    const bool apart = !whole && end == plan.tiles && plan.vectors.first > 0;
    stretch.run<false>(begin, end - apart);
    if (apart) stretch.run_apart(end - 1, end, false);
}

// Parts to cut one image's tiles into, so that every thread has a few to take.
int64_t count_parts(int64_t batch, int64_t tiles, int threads) {
    const int64_t wanted = threads > 1 ? divide_up(4 * static_cast<int64_t>(threads), batch) : 1;
    return wanted < tiles ? wanted : tiles;
}

int64_t padded_size(const Plan& plan) {
    return plan.shape.channels * plan.shape.height * plan.shape.width;
}

// A channel of an image into the middle of zeros.
void pad_channel(const Plan& plan, const float* from, float* to) {
    const Layer& layer = plan.layer;
    const int64_t row = plan.shape.width;
    memset(to, 0, static_cast<size_t>(plan.shape.height * row) * sizeof(float));
    for (int64_t y = 0; y < layer.height; ++y)
        memcpy(to + (layer.top + y) * row + layer.left, from + y * layer.width,
               static_cast<size_t>(layer.width) * sizeof(float));
}

// The tiles [begin, end) of an image, numbered through its filter blocks.
void run_part(const Plan& plan, const float* x, float* y, int64_t begin, int64_t end,
              bool accumulate, bool streams, bool whole) {
    int64_t next = 0;
    for (int64_t tile = begin; tile < end; tile = next) {
        const int64_t block = tile / plan.tiles, start = block * plan.tiles;
        next = start + plan.tiles < end ? start + plan.tiles : end;
        if (streams)
            Stretch(plan, x, y, block).run_streamed();
        else
            run_tiles(plan, x, y, block, tile - start, next - start, accumulate, whole);
    }
}

// Whole images have a padded copy per thread, parts of images one per image. False without memory.
bool run(const Plan& plan, const float* x, float* y, bool accumulate, int threads) {
    const Shape& s = plan.shape;
    const Layer& layer = plan.layer;
    const int64_t pixels = layer.height * layer.width;
    const int64_t y_image = s.filters * s.out_height * s.out_width;
    const int64_t tiles = plan.blocks * plan.tiles;
    const int64_t parts = count_parts(s.batch, tiles, threads);
    const int64_t units = s.batch * parts, padded = padded_size(plan);
    const int team = static_cast<int>(threads < units ? threads : units);
    const bool streams = ECE408_STREAMS && parts == 1 && !accumulate &&
                         taps(s) <= kStreamedTaps && exceeds_caches(s.batch * y_image);
    float* copies = nullptr;
    if (layer.padded()) {
        const int64_t count = parts == 1 ? team : s.batch;
        copies = static_cast<float*>(malloc(static_cast<size_t>(count * padded) * sizeof(float)));
        if (!copies) return false;
    }
#pragma omp parallel num_threads(team)
    {
#pragma omp for schedule(static)
        for (int64_t c = 0; c < (copies && parts > 1 ? s.batch * s.channels : 0); ++c)
            pad_channel(plan, x + c * pixels, copies + c * s.height * s.width);
#pragma omp for schedule(dynamic) nowait
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t b = unit / parts, part = unit % parts;
            const float* image = x + b * s.channels * pixels;
            if (copies) {
                float* own = copies + (parts == 1 ? omp_get_thread_num() : b) * padded;
                for (int64_t c = 0; c < s.channels && parts == 1; ++c)
                    pad_channel(plan, image + c * pixels, own + c * s.height * s.width);
                image = own;
            }
            run_part(plan, image, y + b * y_image, part_start(tiles, parts, part),
                     part_start(tiles, parts, part + 1), accumulate, streams, parts == 1);
        }
#if ECE408_STREAMS
        finish_streams();
#endif
    }
    free(copies);
    return true;
}

int run_layer(const Layer& layer, const float* x, const float* bias, float* y, bool accumulate,
              int threads) {
    Plan plan;
    if (!make_plan(layer, bias, &plan)) return ECE408_NO_MEMORY;
    const bool done = run(plan, x, y, accumulate, threads);
    free(plan.memory);
    return done ? ECE408_OK : ECE408_NO_MEMORY;
}

}  // namespace

#define ECE408_JOIN(a, b) a##b
#define ECE408_NAME(prefix, isa) ECE408_JOIN(prefix, isa)

int ECE408_NAME(direct_forward_, ECE408_ISA)(const ece408_problem& problem, const float* x,
                                             const float* w, const float* bias, float* y,
                                             bool accumulate, int threads) {
    if (!direct_suits(problem, kLanes)) return ECE408_UNSUPPORTED;
    return run_layer(forward_layer(problem, w), x, bias, y, accumulate, threads);
}

int ECE408_NAME(direct_backward_data_, ECE408_ISA)(const ece408_problem& problem, const float* w,
                                                   const float* dy, float* dx, bool accumulate,
                                                   int threads) {
    if (!direct_suits_backward(problem, kLanes)) return ECE408_UNSUPPORTED;
    return run_layer(backward_layer(problem, w), dy, nullptr, dx, accumulate, threads);
}

}  // namespace ece408
