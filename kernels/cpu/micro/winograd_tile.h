// The register tile of winograd.cpp: MT filters by VT vectors of 2x2 output tiles, summed over all
// components, channels and taps.
#pragma once

#include <stdint.h>

#include "micro/vector.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// The order of row components: those that both output rows use come first.
constexpr int kComponentOrder[kComponents] = {1, 2, 3, 0};
// Column components in two sets: 1 and 2, which both output columns use, are summed together; then
// 0 and 3, which one output column uses. So the common sums never leave the registers.
constexpr int kColumnComponents[2][2] = {{1, 2}, {0, 3}};

// Tile sizes: two sums for each filter and vector.
#if ECE408_LANES == 16
constexpr int kMostFilters = 6;
constexpr int tile_vectors(int filters) { return filters > 4 ? 2 : filters > 3 ? 3 : 4; }
#else
constexpr int kMostFilters = ECE408_LANES == 8 ? 3 : 2;
constexpr int tile_vectors(int) { return 2; }
#endif
// Block size for many filters: the tile with the fewest loads per product.
constexpr int64_t kBlockFilters = ECE408_LANES == 16 ? 4 : kMostFilters;

struct WinogradTileArgs {
    int64_t channels, component, pitch, groups;  // groups of kernel rows
    const float* x;                              // the tile's first pixel in the components
    const float* packed;                         // of the block
    float* y;                                    // the first filter's sums, at the tile's first lane
    int64_t sums;                                // floats of a plane of sums; a filter has four, for the 2x2 outputs
};

// One tap: vectors of a component's pixels times one weight per filter.
template <int MT, int VT>
__attribute__((always_inline)) inline void add_tap(const float* x, const float* weight,
                                                   Vec (&sum)[MT][VT]) {
    Vec in[VT];
    ECE408_UNROLL
    for (int v = 0; v < VT; ++v) in[v] = load(x + v * kLanes);
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        const Vec factor = broadcast(weight[m]);
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) sum[m][v] = multiply_add(in[v], factor, sum[m][v]);
    }
}

// All taps of row component T with column components A and B.
template <int T, int A, int B, int GROUPS, int MT, int VT>
__attribute__((always_inline)) inline void add_row(const WinogradTileArgs& args, const float*& weight,
                                                   Vec (&a)[MT][VT], Vec (&b)[MT][VT]) {
    constexpr int kSkipped = B < 3 ? 0 : GROUPS - 1;  // groups of columns that B lacks
    const int64_t skipped = T == 3 ? args.groups - 1 : 0;
    const float* x = args.x + T * args.channels * kComponents * args.component + skipped * args.pitch;
    for (int64_t c = 0; c < args.channels; ++c, x += kComponents * args.component) {
        const float* in_a = x + A * args.component;
        const float* in_b = x + B * args.component;
        for (int64_t g = skipped; g < args.groups; ++g) {
            // Two base addresses; GCC would use one per load.
            __asm__("" : "+r"(in_a), "+r"(in_b));
            ECE408_UNROLL
            for (int q = 0; q < GROUPS; ++q) {
                add_tap(in_a + q, weight, a);
                weight += MT;
                if (q < kSkipped) continue;
                add_tap(in_b + q, weight, b);
                weight += MT;
            }
            in_a += args.pitch;
            in_b += args.pitch;
        }
    }
}

// Adds stored sums to those in registers.
template <int MT, int VT>
__attribute__((always_inline)) inline void add_kept(const float* kept, int64_t step,
                                                    Vec (&sum)[MT][VT]) {
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) sum[m][v] = sum[m][v] + load(kept + m * step + v * kLanes);
    }
}

template <int MT, int VT>
__attribute__((always_inline)) inline void keep(const Vec (&sum)[MT][VT], int64_t step,
                                                float* kept) {
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) store(kept + m * step + v * kLanes, sum[m][v]);
    }
}

// Replaces the stored sums of row component 1 by their sum with row component 2, for even rows, and
// their difference, for odd rows.
template <int MT, int VT>
__attribute__((always_inline)) inline void keep_both(const Vec (&second)[MT][VT], int64_t step,
                                                     float* even, float* odd) {
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) {
            const int64_t at = m * step + v * kLanes;
            const Vec first = load(even + at);
            store(even + at, first + second[m][v]);
            store(odd + at, first - second[m][v]);
        }
    }
}

// Sums row component T and combines it with the stored sums.
template <int T, int GROUPS, int MT, int VT>
__attribute__((always_inline)) inline void add_component(const WinogradTileArgs& args,
                                                         const float*& weight) {
    const int64_t step = 4 * args.sums;
    float* const even_row = args.y;
    float* const odd_row = even_row + 2 * args.sums;
    Vec a[MT][VT], b[MT][VT];
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        const Vec first = broadcast(T == 1 ? args.packed[m] : 0.0f);
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) {
            a[m][v] = first;
            b[m][v] = broadcast(0.0f);
        }
    }
    add_row<T, 1, 2, GROUPS>(args, weight, a, b);
    ECE408_UNROLL
    for (int m = 0; m < MT; ++m) {
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) {
            const Vec first = a[m][v];
            a[m][v] = first + b[m][v];
            b[m][v] = first - b[m][v];
        }
    }
    float* const to = T == 3 ? odd_row : even_row;
    if (T == 3 || T == 0) {
        add_kept(to, step, a);
        add_kept(to + args.sums, step, b);
    }
    add_row<T, 0, 3, GROUPS>(args, weight, a, b);
    if (T == 2) {
        keep_both(a, step, even_row, odd_row);
        keep_both(b, step, even_row + args.sums, odd_row + args.sums);
    } else {
        keep(a, step, to);
        keep(b, step, to + args.sums);
    }
}

template <int GROUPS, int MT, int VT>
__attribute__((noinline)) void run_tile(const WinogradTileArgs& args) {
    const float* weight = args.packed + MT;
    add_component<1, GROUPS, MT, VT>(args, weight);
    add_component<2, GROUPS, MT, VT>(args, weight);
    add_component<3, GROUPS, MT, VT>(args, weight);
    add_component<0, GROUPS, MT, VT>(args, weight);
}

using Tile = void(const WinogradTileArgs&);

template <int GROUPS, int MT, int VT>
Tile* pick_vectors(int64_t vectors) {
    if constexpr (VT > 1) {
        if (vectors < VT) return pick_vectors<GROUPS, MT, VT - 1>(vectors);
    }
    return run_tile<GROUPS, MT, VT>;
}

template <int GROUPS, int MT = kMostFilters>
Tile* pick_filters(int64_t filters, int64_t vectors) {
    if constexpr (MT > 1) {
        if (filters < MT) return pick_filters<GROUPS, MT - 1>(filters, vectors);
    }
    return pick_vectors<GROUPS, MT, tile_vectors(MT)>(vectors);
}

// The tile for this number of column groups, filters (up to kMostFilters) and vectors (up to
// tile_vectors()).
Tile* pick_tile(int64_t groups, int64_t filters, int64_t vectors) {
    switch (groups) {
        case 1: return pick_filters<1>(filters, vectors);
        case 2: return pick_filters<2>(filters, vectors);
        default: return pick_filters<3>(filters, vectors);
    }
}

}  // namespace
}  // namespace ece408
