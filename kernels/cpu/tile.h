// The register tile: MT filters by VT vectors of output pixels, summed over all channels and taps
// without touching the output.
//
// The output plane is taken as one flat run of vectors. Lane l of a vector that starts at output
// (i, j) reads x at row i + p, column j + q + l, which is contiguous until the vector crosses
// into the next output row; from there on the input skips kernel_w - 1 more pixels. So a vector
// that straddles two rows is one load merged with a second one, kernel_w - 1 floats further on.
// Neither load leaves the pixels that the vector's own lanes read at both of its ends; a vector
// of the same tile that does not straddle must not skip, as its second load would leave them.
//
// All sums run over c, p, q in this order in every form, so that an output pixel is the same to
// the last bit whichever tile computes it.
#pragma once

#include <stdint.h>

#include "vector.h"

#if defined(__clang__)
#define ECE408_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ECE408_UNROLL _Pragma("GCC unroll 16")
#endif

namespace ece408 {
namespace {

// How a vector of input pixels is loaded.
enum Form {
    kPlain,     // all lanes in one row
    kStraddle,  // lanes from `split` on are in the next row
    kNarrow,    // lanes from `split` on do not exist: the row is shorter than a vector
    kForms
};

struct TileArgs {
    int64_t channels, height, width, kernel_h, kernel_w;
    const float* x;          // one image
    const float* packed;     // MT biases, then the weights as [c][p][q][MT]
    const int64_t* in;       // per vector: where its first lane's window starts in a channel of x
    const int* split;        // per vector: see Form
    float* y;                // the first filter's output
    const int64_t* out;      // per vector: where its first lane goes in y
    int64_t filter_step;     // floats from one filter's output to the next
};

template <Form F>
inline Vec load_pixels(const float* p, Mask mask, int64_t skip) {
    if (F == kNarrow) return load_only(mask, p);
    if (F == kStraddle) return load_over(load(p), mask, p + skip);
    return load(p);
}

// One tap: a vector of input pixels each, times one weight per filter.
template <Form F, int MT, int VT>
__attribute__((always_inline)) inline void add_tap(const float* (&pixel)[VT],
                                                   const Mask (&mask)[VT],
                                                   const int64_t (&skip)[VT],
                                                   const float*& weight, Vec (&sum)[MT][VT]) {
    Vec in[VT];
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) in[v] = load_pixels<F>(pixel[v]++, mask[v], skip[v]);
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        const Vec factor = broadcast(*weight++);
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) sum[m][v] = multiply_add(in[v], factor, sum[m][v]);
    }
}

// KW is the kernel's width as a constant, or 0 to take it from the arguments.
template <Form F, int KW, int MT, int VT>
__attribute__((noinline)) void tile(const TileArgs& args) {
    const int64_t kernel_w = KW ? KW : args.kernel_w;
    const float* weight = args.packed;
    const float* pixel[VT];
    Mask mask[VT];
    int64_t skip[VT];
    Vec sum[MT][VT];
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) {
        pixel[v] = args.x + args.in[v];
        mask[v] = F == kNarrow ? lanes_below(args.split[v]) : lanes_from(args.split[v]);
        skip[v] = args.split[v] < kLanes ? kernel_w - 1 : 0;
    }
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        const Vec bias = broadcast(*weight++);
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) sum[m][v] = bias;
    }
    const int64_t next_row = args.width - kernel_w;
    const int64_t next_channel = (args.height - args.kernel_h) * args.width;
    for (int64_t c = 0; c < args.channels; ++c) {
        for (int64_t p = 0; p < args.kernel_h; ++p) {
            if constexpr (KW != 0) {
                ECE408_UNROLL
                for (int q = 0; q < KW; ++q) add_tap<F>(pixel, mask, skip, weight, sum);
            } else {
                for (int64_t q = 0; q < kernel_w; ++q)
                    add_tap<F>(pixel, mask, skip, weight, sum);
            }
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) pixel[v] += next_row;
        }
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) pixel[v] += next_channel;
    }
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) store(args.y + m * args.filter_step + args.out[v], sum[m][v]);
    }
}

using Tile = void (*)(const TileArgs&);

template <Form F, int KW, int MT, int VT>
Tile pick_vectors(int vectors) {
    if constexpr (VT > 1) {
        if (vectors < VT) return pick_vectors<F, KW, MT, VT - 1>(vectors);
    }
    return tile<F, KW, MT, VT>;
}

template <Form F, int KW, int MT>
Tile pick_filters(int filters, int vectors) {
    if constexpr (MT > 1) {
        if (filters < MT) return pick_filters<F, KW, MT - 1>(filters, vectors);
    }
    return pick_vectors<F, KW, MT, kMaxVectors>(vectors);
}

// The tile of the run-time size given, filters <= kMaxFilters and vectors <= kMaxVectors. The
// usual kernel widths have code of their own; narrow planes are not worth that.
template <Form F>
Tile pick_tile(int64_t kernel_w, int filters, int vectors) {
    if constexpr (F != kNarrow) {
        switch (kernel_w) {
            case 1: return pick_filters<F, 1, kMaxFilters>(filters, vectors);
            case 3: return pick_filters<F, 3, kMaxFilters>(filters, vectors);
            case 5: return pick_filters<F, 5, kMaxFilters>(filters, vectors);
            case 7: return pick_filters<F, 7, kMaxFilters>(filters, vectors);
        }
    }
    return pick_filters<F, 0, kMaxFilters>(filters, vectors);
}

}  // namespace
}  // namespace ece408
