// A register tile of dot products between rows, such as filters of dy, and other rows, such as x
// under some taps. Vectorised along the rows; lanes are added up once, at the end.
#pragma once

#include "micro/lanes.h"

namespace ece408 {
namespace {

// Filters by taps of a tile. Besides their sums, registers hold a vector of each filter and one of
// x.
constexpr int kDotFilters = ECE408_LANES == 16 ? 4 : ECE408_LANES == 8 ? 3 : 2;
constexpr int kDotTaps = ECE408_LANES == 16 ? 6 : 4;
constexpr int64_t kDotsOfTile = kDotFilters * kDotTaps;

// Each row has `runs` runs of `vectors` vectors.
template <class Sum>
struct DotTile {
    const Sum* tap[kDotTaps];  // beginning of each tap's row
    const Sum* dy;             // the first filter's row
    int64_t filter_step;
    int64_t runs, vectors;
    int64_t x_run, dy_run;   // from one run to the next
    double* totals;          // sums are added; those of a filter are adjacent,
    int64_t totals_step;     // from one filter to the next
    const Sum* dy_ahead[2];  // rows to prefetch, or rows of this tile
    const Sum* x_ahead;
};

template <int... Lane>
struct LaneList {};
template <int N, int... Lane>
struct AllLanes : AllLanes<N - 1, N - 1, Lane...> {};
template <int... Lane>
struct AllLanes<0, Lane...> {
    using List = LaneList<Lane...>;
};

template <class Sum>
struct LaneIndex {
    typedef int32_t Type __attribute__((vector_size(ECE408_LANES * 4)));
};
template <>
struct LaneIndex<double> {
    typedef int64_t Type __attribute__((vector_size(ECE408_LANES * 4)));
};

// Adds pairs of lanes that are H apart: those of `a` into the lanes without bit H, those of `b`
// into the others.
template <class Sum, int H, int... Lane>
inline typename Lanes<Sum>::Vec add_lane_pairs(typename Lanes<Sum>::Vec a, typename Lanes<Sum>::Vec b,
                                               LaneList<Lane...>) {
    constexpr int kCount = Lanes<Sum>::count;
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (Lane & H ? kCount + Lane : Lane)...) +
           __builtin_shufflevector(a, b, ((Lane & H ? kCount : 0) + (Lane ^ H))...);
#else
    using Index = typename LaneIndex<Sum>::Type;
    return __builtin_shuffle(a, b, Index{(Lane & H ? kCount + Lane : Lane)...}) +
           __builtin_shuffle(a, b, Index{((Lane & H ? kCount : 0) + (Lane ^ H))...});
#endif
}

// Returns a vector with the lane sum of each vector; there are as many vectors as lanes.
template <class Sum, int H>
inline typename Lanes<Sum>::Vec sum_each(typename Lanes<Sum>::Vec* vectors) {
    if constexpr (H == 0) {
        return vectors[0];
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < H; ++i)
            vectors[i] = add_lane_pairs<Sum, H>(vectors[i], vectors[i + H],
                                                typename AllLanes<Lanes<Sum>::count>::List());
        return sum_each<Sum, H / 2>(vectors);
    }
}

template <class Sum, int MT, int NT>
inline void add_to_totals(const typename Lanes<Sum>::Vec (&sums)[MT * NT], double* totals,
                          int64_t step) {
    using L = Lanes<Sum>;
    constexpr int N = MT * NT;
    constexpr int kCount = L::count, kRounded = (N + kCount - 1) / kCount * kCount;
    alignas(64) Sum each[kRounded];
#pragma GCC unroll 16
    for (int first = 0; first < N; first += kCount) {
        typename L::Vec some[kCount];
#pragma GCC unroll 16
        for (int i = 0; i < kCount; ++i)
            some[i] = first + i < N ? sums[first + i] : typename L::Vec{};
        L::store(each + first, sum_each<Sum, kCount / 2>(some));
    }
    for (int m = 0; m < MT; ++m)
        for (int n = 0; n < NT; ++n) totals[m * step + n] += each[m * NT + n];
}

// PREFETCH: each step prefetches one vector of the rows ahead. Not all at once before the sums,
// because a core has few lines in flight.
template <class Sum, int MT, int NT, bool PREFETCH>
__attribute__((noinline)) void dot_tile(const DotTile<Sum>& tile) {
    using L = Lanes<Sum>;
    typename L::Vec sum[MT * NT] = {};
    for (int64_t run = 0; run < tile.runs; ++run) {
        const Sum* dy = tile.dy + run * tile.dy_run;
        const Sum* tap[NT];
#pragma GCC unroll 16
        for (int n = 0; n < NT; ++n) tap[n] = tile.tap[n] + run * tile.x_run;
        for (int64_t at = 0; at < tile.vectors * L::count; at += L::count) {
            if (PREFETCH) {
                __builtin_prefetch(tile.dy_ahead[0] + run * tile.dy_run + at, 0, 2);
                __builtin_prefetch(tile.dy_ahead[1] + run * tile.dy_run + at, 0, 2);
                __builtin_prefetch(tile.x_ahead + run * tile.x_run + at, 0, 2);
            }
            typename L::Vec from[MT];
#pragma GCC unroll 16
            for (int m = 0; m < MT; ++m) from[m] = L::load(dy + m * tile.filter_step + at);
#pragma GCC unroll 16
            for (int n = 0; n < NT; ++n) {
                const typename L::Vec in = L::load(tap[n] + at);
#pragma GCC unroll 16
                for (int m = 0; m < MT; ++m) sum[m * NT + n] += from[m] * in;
            }
        }
    }
    add_to_totals<Sum, MT, NT>(sum, tile.totals, tile.totals_step);
}

template <class Sum>
using RunDotTile = void (*)(const DotTile<Sum>&);

template <class Sum, bool PREFETCH = false, int MT = kDotFilters, int NT = kDotTaps>
RunDotTile<Sum> pick_dot_tile(int64_t filters, int64_t taps) {
    if constexpr (MT > 1) {
        if (filters < MT) return pick_dot_tile<Sum, PREFETCH, MT - 1, NT>(filters, taps);
    }
    if constexpr (NT > 1) {
        if (taps < NT) return pick_dot_tile<Sum, PREFETCH, MT, NT - 1>(filters, taps);
    }
    return dot_tile<Sum, MT, NT, PREFETCH>;
}

}  // namespace
}  // namespace ece408
