// Shared by direct.cpp and winograd.cpp: a convolution of stride 1, and an output plane divided
// into vectors and register tiles.
#pragma once

#include <string.h>

#include "api/shape.h"
#include "host/buffer.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// Beginning of part `part` of `total`, divided into `parts` as evenly as possible.
inline int64_t part_start(int64_t total, int64_t parts, int64_t part) {
    return total * part / parts;
}

// A convolution of images that are copied for it, with a border or with the pixels that strides
// select; shape.height and shape.width are the copy's.
struct Layer {
    Shape shape;
    int64_t height, width, top, left;  // of the image, and its position in the copy
    const float* weights;
    bool rotated;  // weights are (channels, filters, ...), the kernel rotated
    int64_t stride_h, stride_w;

    bool as_it_is() const { return height == shape.height && width == shape.width; }
    // The first tap of a filter's window in a channel; if the kernel is rotated, the other taps are
    // before it.
    const float* taps(int64_t m, int64_t c) const {
        const int64_t window = shape.kernel_h * shape.kernel_w;
        return rotated ? weights + (c * shape.filters + m + 1) * window - 1
                      : weights + (m * shape.channels + c) * window;
    }
    float weight(int64_t m, int64_t c, int64_t p, int64_t q) const {
        const int64_t tap = p * shape.kernel_w + q;
        return taps(m, c)[rotated ? -tap : tap];
    }
};

inline Layer forward_layer(const ece408_problem& problem, const float* w) {
    const ece408_problem p = flattened(problem);
    const bool picked = problem.stride_h > 1 || problem.stride_w > 1;
    const ece408_problem& image = picked ? problem : p;
    Layer layer = {derive(p), image.height, image.width, p.pad_h, p.pad_w, w, false,
                   problem.stride_h, problem.stride_w};
    layer.shape.height += 2 * p.pad_h;
    layer.shape.width += 2 * p.pad_w;
    return layer;
}

// The gradient for x: a convolution of dy, channels and filters swapped.
inline Layer backward_layer(const ece408_problem& problem, const float* w) {
    const Shape s = derive(flattened(problem));
    Layer layer = {gradient_shape(s), s.out_height, s.out_width, s.kernel_h - 1 - s.pad_h,
                   s.kernel_w - 1 - s.pad_w, w, true, 1, 1};
    layer.shape.height = s.height + s.kernel_h - 1;
    layer.shape.width = s.width + s.kernel_w - 1;
    return layer;
}

// Copies a channel of an image into the middle of zeros.
inline void pad_channel(const Layer& layer, const float* from, float* to) {
    const int64_t row = layer.shape.width;
    memset(to, 0, static_cast<size_t>(layer.shape.height * row) * sizeof(float));
    for (int64_t y = 0; y < layer.height; ++y)
        memcpy(to + (layer.top + y) * row + layer.left, from + y * layer.width,
               static_cast<size_t>(layer.width) * sizeof(float));
}

// Cost of a tile for one tap, in multiply-adds of one unit: at least its loads and the latency of a
// sum, and part of its start and end.
inline int64_t tile_cost(int64_t filters, int64_t vectors) {
    int64_t cost = filters * vectors;
    const int64_t loads = filters + 2 * vectors, latency = 8;
    if (cost < loads) cost = loads;
    if (cost < latency) cost = latency;
    return cost + 2;
}

// The number of blocks of filters that makes a plane cheapest.
inline int64_t choose_blocks(int64_t filters) {
    int64_t best = 0, best_cost = 0;
    for (int64_t most = kMaxFilters; most > 0; --most) {
        const int64_t blocks = divide_up(filters, most), large = divide_up(filters, blocks);
        const int64_t vectors = most_vectors(static_cast<int>(large));
        const int64_t of_large = filters % blocks ? filters % blocks : blocks;
        const int64_t of_all = of_large * tile_cost(large, vectors) +
                               (blocks - of_large) * tile_cost(large - 1, vectors);
        // For 12 vectors, a multiple of every tile size.
        const int64_t cost = of_all * 12 / vectors;
        if (best == 0 || cost < best_cost) {
            best = blocks;
            best_cost = cost;
        }
    }
    return best;
}

// Filters in blocks of almost one size, the larger ones first.
struct FilterBlocks {
    int64_t filters, blocks;

    explicit FilterBlocks(const Shape& s)
        : filters(s.filters),
          blocks(is_in_eights(s, kLanes) ? s.filters / kOddFilters : choose_blocks(s.filters)) {}

    int64_t large_blocks() const { return filters % blocks; }
    int64_t first_filter(int64_t block) const {
        const int64_t large = large_blocks();
        return block * (filters / blocks) + (block < large ? block : large);
    }
    int64_t filters_of(int64_t block) const {
        return filters / blocks + (block < large_blocks() ? 1 : 0);
    }
};

// The output planes of an image as register tiles: blocks of filters, and in each block the flat
// plane divided into vectors. The last vector is moved back to end with the plane, so its first
// `first` lanes belong to its neighbour.
struct Tiling : FilterBlocks {
    int64_t plane;
    // The tiles of a block: `wide` of `size` + 1 vectors, then the others of `size`.
    int64_t tiles, size, wide;
    int64_t count;  // vectors
    // Per vector: offset of its first lane's window in a channel of the image,
    Buffer<int64_t> in;
    Buffer<int64_t> out;  // its first lane in the plane,
    Buffer<int> split;    // its first lane in the next row, or kLanes
    int first;
    int64_t odd = 0;  // the number of tiles, the first ones, with an extra pixel

    explicit Tiling(const Shape& s) : FilterBlocks(s) {}

    int64_t all() const { return blocks * tiles; }
    int64_t first_vector(int64_t tile) const {
        return tile * size + (tile < wide ? tile : wide);
    }
    int64_t tile_of(int64_t vector) const {
        const int64_t of_wide = wide * (size + 1);
        return vector < of_wide ? vector / (size + 1) : wide + (vector - of_wide) / size;
    }
};

// For rows of out_width outputs over an image with rows of `width`. False without memory.
inline bool make_tiling(int64_t out_height, int64_t out_width, int64_t width, Tiling* t) {
    t->plane = out_height * out_width;
    t->count = divide_up(t->plane, kLanes);
    t->in = Buffer<int64_t>(t->count);
    t->out = Buffer<int64_t>(t->count);
    t->split = Buffer<int>(t->count);
    if (!t->in || !t->out || !t->split) return false;
    t->tiles = divide_up(t->count, most_vectors(static_cast<int>(t->filters_of(0))));
    t->size = t->count / t->tiles;
    t->wide = t->count % t->tiles;
    t->first = static_cast<int>(t->count * kLanes - t->plane);
    for (int64_t v = 0; v < t->count; ++v) {
        const int64_t start = v < t->count - 1 ? v * kLanes : t->plane - kLanes;
        const int64_t row = start / out_width, column = start % out_width;
        const int64_t left = out_width - column;
        t->in[v] = row * width + column;
        t->out[v] = start;
        t->split[v] = static_cast<int>(left < kLanes ? left : kLanes);
    }
    return true;
}

// The plane of a 1x1 kernel as `odd` tiles with an extra pixel, and others without. False without
// memory.
inline bool make_odd_tiling(int64_t plane, int64_t odd, Tiling* t) {
    t->plane = plane, t->odd = odd;
    t->tiles = plane / (kOddVectors * kLanes);
    t->size = kOddVectors, t->wide = 0, t->first = 0;
    t->count = t->tiles * kOddVectors;
    t->in = Buffer<int64_t>(t->count);
    t->out = Buffer<int64_t>(t->count);
    if (!t->in || !t->out) return false;
    for (int64_t v = 0; v < t->count; ++v) {
        const int64_t tile = v / kOddVectors;
        t->in[v] = t->out[v] = v * kLanes + (tile < odd ? tile : odd);
    }
    return true;
}

// Parts of one image's tiles, so that every thread has a few to take.
inline int64_t count_parts(int64_t batch, int64_t tiles, int threads) {
    const int64_t wanted = threads > 1 ? divide_up(4 * static_cast<int64_t>(threads), batch) : 1;
    return wanted < tiles ? wanted : tiles;
}

}  // namespace
}  // namespace ece408
