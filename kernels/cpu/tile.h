// The register tile: MT filters by VT vectors of output pixels, summed over all channels and taps
// without touching the output. A strip is a run of such tiles along the output plane.
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

#include "finish.h"
#include "vector.h"

namespace ece408 {
namespace {

struct StripArgs {
    int64_t channels, height, width, kernel_h, kernel_w;
    const float* x;       // one image
    const float* packed;  // MT biases, then the weights as [c][p][q][MT];
    const float* bias;    // for a single tap instead the first filter's, or null,
    const float* weights;  // and the weights,
    int64_t weight_step, channel_step;  // with these floats from filter to filter and channel
    int64_t tiles;        // of VT vectors each, one after the other
    const int64_t* in;    // per vector: where its first lane's window starts in a channel of x
    const int* split;     // per vector: its first lane in the next row, or kLanes
    float* y;             // the first filter's output
    const int64_t* out;   // per vector: where its first lane goes in y
    int64_t filter_step;  // floats from one filter's output to the next
    // What is done to each output, the arrays those of the first filter, or nothing if factors are null.
    ece408_finish finish;
    // What will be read later: each tile prefetches some runs of cache lines of it, `ahead_step` apart.
    const float* ahead;
    int64_t ahead_runs, ahead_lines, ahead_step;
    // Of a streamed strip only: whether it starts the plane, and the last vector of each filter.
    bool head;
    float* carried;
};

// One tap: a vector of input pixels each, times one weight per filter.
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
        // A load that a mask of no lanes suppresses may have any address.
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

// KW is the kernel's width as a constant, or 0 to take it from the arguments.
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

// Channels [begin, end) of a kernel of a single tap, whose weights are read where they are: packing
// them would take as long as a small plane's products. All addresses are of few registers, which few
// instructions move on: where two threads share a core, instructions are what it is short of.
template <int MT, int VT>
__attribute__((always_inline)) inline void add_channels(const StripArgs& args, const int64_t* in,
                                                        int64_t begin, int64_t end,
                                                        Vec (&sum)[MT][VT]) {
    const int64_t step = args.weight_step, plane = args.height * args.width;
    const int64_t rows[6] = {0, step, 2 * step, hidden(3 * step), 4 * step, hidden(5 * step)};
    const float* pixel[VT];
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) pixel[v] = args.x + in[v];
    const float* weight = args.weights + begin * args.channel_step;
    int64_t at = begin * plane;
    const int64_t all = end * plane;
    do {
        Vec x[VT];
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) x[v] = load(pixel[v] + at);
        at += plane;
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            const float* row = m < 6 ? weight : weight + 6 * step;
            const Vec factor = broadcast(row[rows[m % 6]]);
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) sum[m][v] = multiply_add(x[v], factor, sum[m][v]);
        }
        // GCC makes a loop of its own for a step of one, and keeps sums of the other loop in memory.
        weight += hidden(args.channel_step);
    } while (at != all);
}

// All channels, in partial sums of kBlock channels: long sums in one piece lose more to rounding.
template <int MT, int VT>
__attribute__((always_inline)) inline void add_single_taps(const StripArgs& args,
                                                           const int64_t* in,
                                                           Vec (&sum)[MT][VT]) {
    constexpr int64_t kBlock = 256;
    for (int64_t c = 0; c < args.channels; c += kBlock) {
        alignas(64) float before[MT][VT][kLanes];
        ECE408_UNROLL
        for (int m = 0; m < MT && c > 0; ++m) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) {
                store(before[m][v], sum[m][v]);
                sum[m][v] = broadcast(0.0f);
            }
        }
        const int64_t left = args.channels - c, end = c + (left < kBlock ? left : kBlock);
        add_channels(args, in, c, end, sum);
        ECE408_UNROLL
        for (int m = 0; m < MT && c > 0; ++m) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) sum[m][v] = load(before[m][v]) + sum[m][v];
        }
    }
}

template <int MT, int VT>
__attribute__((always_inline)) inline void finish_tile(const StripArgs& args, const int64_t* out,
                                                       Vec (&sum)[MT][VT]) {
    const Finish finish(args.finish);
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v)
            sum[m][v] = finish(m, m * args.filter_step + out[v], sum[m][v]);
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
// Writes whole cache lines past the caches, wherever the plane starts: a line is a vector or the
// end of one and the start of the next, for which each filter's last vector is carried to the next
// tile.
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

// What a streamed strip that ended before output `out` still carries of a filter's plane.
inline void finish_stream(float* plane, int64_t out, const float* carried) {
    const int shift = floats_past_line(plane);
    const Vec last = load(carried);
    store_only(lanes_below(shift), plane - shift + out, across(last, lines_after(shift), last));
}
#endif

// A tile's share of the weights of the next block of filters: their rows are too short for processors to
// fetch ahead by themselves.
template <int MT>
inline void ask_for_weights(const StripArgs& args, int64_t tile) {
    if (args.channel_step != 1) return;
    const int64_t lines = (MT * args.channels + kLine - 1) / kLine;
    const float* const next = args.weights + MT * args.channels;
    for (int64_t line = tile; line < lines; line += args.tiles) prefetch(next + line * kLine);
}

template <bool Stream, bool SingleTap>
struct Strip {
    using Function = void(const StripArgs&);

    template <int MT, int VT>
    __attribute__((always_inline)) static void start(const StripArgs& args, Vec (&sum)[MT][VT]) {
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            float first = 0;
            if (!SingleTap)
                first = args.packed[m];
            else if (args.bias)
                first = args.bias[m];
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) sum[m][v] = broadcast(first);
        }
    }

    template <int KW, int MT, int VT>
    __attribute__((noinline)) static void run(const StripArgs& args) {
        for (int64_t tile = 0; tile < args.tiles; ++tile) {
            const int64_t* in = args.in + tile * VT;
            const int* split = args.split + tile * VT;
            for (int64_t i = 0; i < args.ahead_runs; ++i)
                for (int64_t line = 0; line < args.ahead_lines; ++line)
                    prefetch(args.ahead + (tile * args.ahead_runs + i) * args.ahead_step +
                             line * kLine);
            if constexpr (SingleTap) ask_for_weights<MT>(args, tile);
            Vec sum[MT][VT];
            start(args, sum);
            if constexpr (SingleTap)
                add_single_taps(args, in, sum);
            else
                add_window<KW>(args, in, split, sum);
            if (args.finish.factors) finish_tile(args, args.out + tile * VT, sum);
#if ECE408_STREAMS
            if constexpr (Stream) {
                stream_tile(args, args.out[tile * VT], args.head && tile == 0, sum);
                continue;
            }
#endif
            store_tile(args, args.out + tile * VT, sum);
        }
    }
};

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

// The function of a family for a tile of the run-time size given, filters <= kMaxFilters and
// vectors <= most_vectors(filters). The usual kernel widths have code of their own.
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
