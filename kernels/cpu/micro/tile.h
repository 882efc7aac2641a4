// The register tile of direct.cpp: MT filters by VT vectors of output pixels, summed over all
// channels and taps without touching the output. A strip is a run of such tiles along the output
// plane.
//
// The output plane is a flat run of vectors. Lane l of a vector that begins at output (i, j) reads
// x at row i + p, column j + q + l. These pixels are contiguous until the vector crosses into the
// next output row; from there on the input skips kernel_w - 1 more pixels. So a vector that
// straddles two rows is one load merged with a second load kernel_w - 1 floats further on. Each
// load stays within the pixels that the vector's own lanes read. A vector of the same tile that
// does not straddle must not skip, or its second load would leave them.
//
// In all variants sums run over c, p, q in this order, so every tile computes an output pixel to
// the same last bit.
#pragma once

#include <stdint.h>

#include "host/thread_pool.h"
#include "micro/epilogue.h"
#include "micro/interleave.h"
#include "micro/plane.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

struct StripArgs {
    int64_t channels, height, width, kernel_h, kernel_w;
    const float* x;       // one image
    const float* packed;  // MT biases, then the weights as [c][p][q][MT]
    int64_t tiles;        // successive tiles of VT vectors
    const int64_t* in;    // per vector: offset of its first lane's window in a channel of x
    const int* split;     // per vector: its first lane in the next row, or kLanes
    float* y;             // the first filter's output
    const int64_t* out;   // per vector: offset of its first lane in y
    int64_t filter_step;  // floats from one filter's output to the next
    // The epilogue, with arrays of the first filter; none if factors are null.
    ece408_epilogue epilogue;
    // Data to prefetch: `ahead_lines` cache lines per tile.
    const float* ahead;
    int64_t ahead_lines;
    // Of strips that are streamed: whether this one begins the plane, and each filter's last vector.
    bool head;
    float* carried;  // null for other strips
};

// Floats of packed weights with biases. Odd tiles load vectors that reach beyond them.
inline int64_t packed_floats(const Shape& s) {
    const int64_t beyond = is_in_eights(s, kLanes) ? kLanes : 0;
    return s.filters * (1 + s.channels * s.kernel_h * s.kernel_w) + beyond;
}

// Weights from which on threads divide the packing.
constexpr int64_t kManyWeights = 1 << 15;

// Channels per partial sum of 1x1 kernels: long sums lose more to rounding.
constexpr int64_t kSumChannels = 256;

// End of the partial sum that begins with channel `begin`.
inline int64_t sum_end(const Shape& s, int64_t begin) {
    const int64_t end = begin + kSumChannels;
    return end < s.channels ? end : s.channels;
}

// Offset of a block's packed weights for a partial sum of `taps` taps with `before` taps before it.
inline int64_t packed_offset(const Shape& s, int64_t first_filter, int64_t before, int64_t taps) {
    return before == 0 ? first_filter * (1 + taps) : s.filters * (1 + before) + first_filter * taps;
}

// Packs block by block of filters: biases or zeros, then weights as [c][p][q][filter]. For 1x1
// kernels this holds the channels of the first partial sum; those of later sums follow likewise.
inline void pack_weights(const Layer& layer, const float* bias, float* packed, int threads) {
    const Shape& s = layer.shape;
    const FilterBlocks blocks(s);
    const int64_t window = s.kernel_h * s.kernel_w, taps = s.channels * window;
    parallel_for(s.filters * taps < kManyWeights ? 1 : threads, blocks.blocks, [&](int64_t block, int) {
        const int64_t first = blocks.first_filter(block), filters = blocks.filters_of(block);
        for (int64_t begin = 0, end; begin < s.channels; begin = end) {
            end = window == 1 ? sum_end(s, begin) : s.channels;
            const int64_t some = (end - begin) * window;
            float* to = packed + packed_offset(s, first, begin, some);
            for (int64_t m = 0; m < filters && begin == 0; ++m) *to++ = bias ? bias[first + m] : 0.0f;
            if (!layer.rotated) {
                interleave(layer.taps(first, begin), taps, filters, filters, some, to);
                continue;
            }
            for (int64_t c = begin; c < end; ++c)
                for (int64_t t = 0; t < window; ++t, to += filters) {
                    const float* from = layer.taps(first, c) - t;
                    for (int64_t m = 0; m < filters; ++m) to[m] = from[m * window];
                }
        }
    });
}

// One tap: vectors of input pixels times one weight per filter.
template <bool Straddle, int MT, int VT>
__attribute__((always_inline)) inline void add_tap(const float* (&pixel)[VT], int64_t q,
                                                   const Mask (&mask)[VT],
                                                   const int64_t (&skip)[VT],
                                                   const float* weight, Vec (&sum)[MT][VT]) {
    Vec in[VT];
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) {
        in[v] = load(pixel[v] + q);
        if (Straddle) in[v] = load_over(in[v], mask[v], pixel[v] + q + skip[v]);
    }
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        const Vec factor = broadcast(weight[m]);
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) sum[m][v] = multiply_add(in[v], factor, sum[m][v]);
    }
}

template <bool Straddle, int KW, int MT, int VT>
__attribute__((always_inline)) inline void add_taps(const StripArgs& args, const int64_t* in,
                                                    const int* split, Vec (&sum)[MT][VT]) {
    const int64_t kernel_w = KW ? KW : args.kernel_w;
    const float* weight = args.packed + MT;
    const float* pixel[VT];
    Mask mask[VT];
    int64_t skip[VT];
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) {
        pixel[v] = args.x + in[v];
        mask[v] = lanes_from(split[v]);
        // A load whose mask suppresses all lanes may have any address.
        skip[v] = kMasksSuppress || split[v] < kLanes ? kernel_w - 1 : 0;
    }
    const int64_t next_channel = (args.height - args.kernel_h) * args.width;
    for (int64_t c = 0; c < args.channels; ++c) {
        for (int64_t p = 0; p < args.kernel_h; ++p) {
            if constexpr (KW != 0) {
                ECE408_UNROLL
                for (int q = 0; q < KW; ++q)
                    add_tap<Straddle>(pixel, q, mask, skip, weight + q * MT, sum);
            } else {
                for (int64_t q = 0; q < kernel_w; ++q)
                    add_tap<Straddle>(pixel, q, mask, skip, weight + q * MT, sum);
            }
            weight += kernel_w * MT;
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) pixel[v] += args.width;
        }
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) pixel[v] += next_channel;
    }
}

// KW: the kernel's width as a constant, or 0 to read it from the arguments.
template <int KW, int MT, int VT>
__attribute__((always_inline)) inline void add_window(const StripArgs& args, const int64_t* in,
                                                      const int* split, Vec (&sum)[MT][VT]) {
    // A kernel of one column skips nothing.
    bool straddles = kMasksSuppress && KW != 1;
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) straddles |= KW != 1 && split[v] < kLanes;
    if (straddles)
        add_taps<true, KW>(args, in, split, sum);
    else
        add_taps<false, KW>(args, in, split, sum);
}

template <int MT, int VT>
__attribute__((always_inline)) inline void apply_epilogue(const StripArgs& args, const int64_t* out,
                                                          Vec (&sum)[MT][VT]) {
    const VectorEpilogue epilogue(args.epilogue);
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v)
            sum[m][v] = epilogue(m, m * args.filter_step + out[v], sum[m][v]);
    }
}

template <int MT, int VT>
__attribute__((always_inline)) inline void store_tile(const StripArgs& args, const int64_t* out,
                                                      const Vec (&sum)[MT][VT]) {
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) store(args.y + m * args.filter_step + out[v], sum[m][v]);
    }
}

#if ECE408_STREAMS
// Writes whole cache lines by non-temporal stores, wherever the plane begins: a line is a vector,
// or the end of one and the beginning of the next, so each filter's last vector is carried to the
// next tile.
template <int MT, int VT>
__attribute__((always_inline)) inline void stream_tile(const StripArgs& args, int64_t out,
                                                       bool head, const Vec (&sum)[MT][VT]) {
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        float* plane = args.y + m * args.filter_step;
        const int shift = floats_past_line(plane);
        float* to = plane - shift + out;
        if (shift == 0) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) stream(to + v * kLanes, sum[m][v]);
            continue;
        }
        const Lines lines = lines_after(shift);
        Vec before = load(args.carried + m * kLanes);
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) {
            const Vec line = across(before, lines, sum[m][v]);
            if (v == 0 && head)
                store_only(lanes_from(shift), to, line);
            else
                stream(to + v * kLanes, line);
            before = sum[m][v];
        }
        store(args.carried + m * kLanes, before);
    }
}

// Stores the rest that a streamed strip still carries of a filter's plane, after it ended before
// output `out`.
inline void end_stream(float* plane, int64_t out, const float* carried) {
    const int shift = floats_past_line(plane);
    const Vec last = load(carried);
    store_only(lanes_below(shift), plane - shift + out, across(last, lines_after(shift), last));
}
#endif

struct Strip {
    using Function = void(const StripArgs&);

    template <int KW, int MT, int VT>
    __attribute__((noinline)) static void run(const StripArgs& args) {
        for (int64_t tile = 0; tile < args.tiles; ++tile) {
            const int64_t* in = args.in + tile * VT;
            const int* split = args.split + tile * VT;
            for (int64_t line = 0; line < args.ahead_lines; ++line)
                prefetch(args.ahead + (tile * args.ahead_lines + line) * kLine);
            Vec sum[MT][VT];
            ECE408_UNROLL
            for (int m = 0; m < MT; ++m) {
                ECE408_UNROLL
                for (int v = 0; v < VT; ++v) sum[m][v] = broadcast(args.packed[m]);
            }
            add_window<KW>(args, in, split, sum);
            if (args.epilogue.factors) apply_epilogue(args, args.out + tile * VT, sum);
#if ECE408_STREAMS
            // A function for both: sums are most of the code.
            if (args.carried) {
                stream_tile(args, args.out[tile * VT], args.head && tile == 0, sum);
                continue;
            }
#endif
            store_tile(args, args.out + tile * VT, sum);
        }
    }
};

// Moves vectors [begin, end) from scratch, as [filter][vector][lane], to the output, without the
// lanes of their neighbours.
inline void put(const Tiling& tiling, const ece408_epilogue& epilogue, float* scratch, float* y,
                int64_t filters, int64_t begin, int64_t end, bool accumulate) {
    for (int64_t m = 0; m < filters; ++m)
        for (int64_t v = begin; v < end; ++v, scratch += kLanes) {
            const int64_t at = m * tiling.plane + tiling.out[v];
            if (epilogue.factors) store(scratch, VectorEpilogue(epilogue)(m, at, load(scratch)));
            float* to = y + at;
            const int first = v == tiling.count - 1 ? tiling.first : 0;
            for (int lane = first; lane < kLanes; ++lane)
                to[lane] = accumulate ? to[lane] + scratch[lane] : scratch[lane];
        }
}

// Offsets of a tile's vectors in such scratch.
constexpr int64_t kInScratch[] = {0, kLanes, 2 * kLanes, 3 * kLanes};

template <class Family, int KW, int MT, int VT>
typename Family::Function* pick_vectors(int vectors) {
    if constexpr (VT > 1) {
        if (vectors < VT) return pick_vectors<Family, KW, MT, VT - 1>(vectors);
    }
    return &Family::template run<KW, MT, VT>;
}

template <class Family, int KW, int MT = kMaxFilters>
typename Family::Function* pick_filters(int filters, int vectors) {
    if constexpr (MT > 1) {
        if (filters < MT) return pick_filters<Family, KW, MT - 1>(filters, vectors);
    }
    return pick_vectors<Family, KW, MT, most_vectors(MT)>(vectors);
}

// The function of a family for this tile size: filters <= kMaxFilters, vectors <=
// most_vectors(filters). Common kernel widths have their own code.
template <class Family>
typename Family::Function* pick_tile(int64_t kernel_w, int filters, int vectors) {
    switch (kernel_w) {
        case 1: return pick_filters<Family, 1>(filters, vectors);
        case 3: return pick_filters<Family, 3>(filters, vectors);
        case 5: return pick_filters<Family, 5>(filters, vectors);
        case 7: return pick_filters<Family, 7>(filters, vectors);
        default: return pick_filters<Family, 0>(filters, vectors);
    }
}

}  // namespace
}  // namespace ece408
