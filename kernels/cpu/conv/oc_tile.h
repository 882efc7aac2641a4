// Microkernel of conv_fwd_oc.h: the register tile and its packed pixels.
#pragma once

#include "conv/oc_geometry.h"
#include "micro/lanes.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// Data to prefetch while a tile computes: one line per product, `step` elements apart. Prefetching
// all at once would stall the products.
template <class Sum>
struct WeightPrefetch {
    const Sum* first;
    int64_t step;
};

// sum + w * *x, where possible as one instruction with a broadcast memory operand.
template <class Sum, class V>
V add_one(V w, const Sum* x, V sum) {
    return sum + w * Lanes<Sum>::broadcast(*x);
}
#if ECE408_LANES == 16
inline Vec add_one(Vec w, const float* x, Vec sum) { return multiply_add_one(w, x, sum); }
#endif

// Accumulates `count` products for P adjacent pixels and Q adjacent pixels of a second row, `gap`
// elements behind the first, at each offset in `taps` (padded by kPrefetchDistance entries). With
// PACKED, the pixels of consecutive products are `gap` elements apart instead.
template <class Sum, int MV, int P, int Q, bool PACKED>
__attribute__((noinline)) void oc_tile(const Sum* pixels, int64_t gap, const int64_t* taps, int64_t count,
                                       const Sum* weight, WeightPrefetch<Sum> ahead, bool add, Sum* out) {
    using L = Lanes<Sum>;
    typename L::Vec sum[P + Q][MV] = {};
    for (int64_t t = 0; t < count; ++t) {
        // One address register each: an indexed address would cost each product an instruction.
        const Sum* const at = PACKED ? pixels : hidden(pixels + taps[t]);
        const Sum* const second = Q ? hidden(at + gap) : at;
        // With 16 lanes the weights fill the first-level cache, so they are prefetched into the
        // second; products take long enough to prefetch pixels, too.
        __builtin_prefetch(ahead.first, 0, ECE408_LANES == 16 ? 2 : 3);
        ahead.first += ahead.step;
        if (ECE408_LANES == 16) {
            const Sum* const prefetched =
                pixels + (PACKED ? kPrefetchDistance * gap : taps[t + kPrefetchDistance]);
            __builtin_prefetch(prefetched, 0, 3);
            if (!PACKED) __builtin_prefetch(prefetched + (Q ? gap + Q : P) - 1, 0, 3);
        }
        typename L::Vec w[MV];
#pragma GCC unroll 2
        for (int v = 0; v < MV; ++v) w[v] = L::load(weight + (t * MV + v) * L::count);
#pragma GCC unroll 16
        for (int p = 0; p < P + Q; ++p) {
            const Sum* const from = p < P ? at + p : second + p - P;
            const bool by_one = p >= (P + Q) / 2;
            const typename L::Vec x = by_one ? typename L::Vec{} : L::broadcast(*from);
#pragma GCC unroll 2
            for (int v = 0; v < MV; ++v)
                sum[p][v] = by_one ? add_one(w[v], from, sum[p][v]) : sum[p][v] + w[v] * x;
        }
        if (PACKED) pixels += gap;
    }
#pragma GCC unroll 16
    for (int p = 0; p < P + Q; ++p)
#pragma GCC unroll 2
        for (int v = 0; v < MV; ++v) {
            Sum* place = out + (p * MV + v) * L::count;
            L::store(place, add ? L::load(place) + sum[p][v] : sum[p][v]);
        }
}

template <class Sum>
using OcTile = void (*)(const Sum* pixels, int64_t gap, const int64_t* taps, int64_t count,
                        const Sum* weight, WeightPrefetch<Sum> ahead, bool add, Sum* out);

// Layout of a tile's pixels: one row, two rows with as many pixels each, two rows with kOcPixels in
// all, or packed.
enum class TileRows { one, equal, full, packed };

constexpr int second_row_pixels(TileRows rows, int first) {
    return rows == TileRows::equal ? first : rows == TileRows::full ? kOcPixels - first : 0;
}

template <class Sum, int MV, TileRows ROWS, int P>
OcTile<Sum> pick_oc_row(int64_t first) {
    if constexpr (P > 1) {
        if (first < P) return pick_oc_row<Sum, MV, ROWS, P - 1>(first);
    }
    return oc_tile<Sum, MV, P, second_row_pixels(ROWS, P), ROWS == TileRows::packed>;
}

template <class Sum, int MV>
OcTile<Sum> pick_oc_rows(int64_t first, int64_t second, bool packed_pixels) {
    if (packed_pixels) return pick_oc_row<Sum, MV, TileRows::packed, kOcPixels>(first);
    if (second == 0) return pick_oc_row<Sum, MV, TileRows::one, kOcPixels>(first);
    if (second == first) return pick_oc_row<Sum, MV, TileRows::equal, kOcPixels / 2>(first);
    return pick_oc_row<Sum, MV, TileRows::full, kOcPixels - 1>(first);
}

// The tile for a number of weight vectors and of pixels in one row, in two rows, or packed.
template <class Sum>
OcTile<Sum> pick_oc_tile(int64_t vectors, int64_t first, int64_t second, bool packed_pixels) {
    return vectors == 1 ? pick_oc_rows<Sum, 1>(first, second, packed_pixels)
                        : pick_oc_rows<Sum, 2>(first, second, packed_pixels);
}

// Vectors that hold a tile's pixels.
template <class Sum>
constexpr int64_t kRunVectors = (kOcPixels + Lanes<Sum>::count - 1) / Lanes<Sum>::count;

// Adjacent pixels of a row, by their offset from the source's first tap.
struct PixelRun {
    int64_t at, count;
};

// Packs a tile's pixels as [product][pixel]. RUNS: number of runs, or 0 if not constant. Copies
// whole vectors; each run overwrites the surplus of the one before.
template <int RUNS, class Sum>
void pack_pixels(const Sum* source, const int64_t* offsets, int64_t count, const PixelRun* run,
                 int64_t runs, Sum* out) {
    using L = Lanes<Sum>;
    for (int64_t t = 0; t < count; ++t, out += kOcPixels) {
        const Sum* from = source + offsets[t];
        Sum* to = out;
        for (int64_t r = 0; r < (RUNS ? RUNS : runs); to += run[r++].count)
#pragma GCC unroll 4
            for (int64_t v = 0; v < kRunVectors<Sum>; ++v)
                L::store(to + v * L::count, L::load(from + run[r].at + v * L::count));
    }
}

// Input transform F(2,3) in two dimensions of adjacent tiles: stores each component to `to`,
// without the last ones where a group has no third tap (`down`, `across`). Source rows are `row`
// apart; of the four columns, the second is `odd` behind the first, the last two `next` behind
// these.
template <class Sum>
__attribute__((always_inline)) inline void store_components(const Sum* at, int64_t row, int64_t odd, int64_t next,
                                                            int down, int across, int64_t begin,
                                                            Sum* const* to) {
    using L = Lanes<Sum>;
    for (int64_t v = 0; v < kRunVectors<Sum> * L::count; v += L::count) {
        typename L::Vec part[4][kComponents];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const Sum* from = at + i * row + v;
            transform_input(L::load(from), L::load(from + odd), L::load(from + next),
                            L::load(from + odd + next), part[i], 1);
        }
#pragma GCC unroll 4
        for (int t = 0; t < kComponents; ++t) {
            typename L::Vec z[kComponents];
            transform_input(part[0][t], part[1][t], part[2][t], part[3][t], z, 1);
#pragma GCC unroll 4
            for (int d = 0; d < kComponents; ++d)
                if (d < down && t < across) L::store(to[d * kComponents + t] + begin + v, z[d]);
        }
    }
}

// Packs a tile's transformed pixels as [component][product][pixel] at `places`, for `count`
// channels that are `channel` apart.
template <bool OneTap, class Sum>
void transform_pixels(const OcConv& conv, const Sum* source, int64_t channel, int64_t row, int64_t count,
                      const PixelRun* run, int64_t runs, Sum* const* places) {
    Sum* to[kComponents2d];  // a local copy, which stores cannot change
    for (int n = 0; n < kComponents2d; ++n) to[n] = places[n];
    const int64_t groups = OneTap ? 1 : conv.residue[0].f23.groups, taps = OneTap ? 1 : conv.across.groups;
    const int64_t down_step = conv.gap_h * row, across_step = conv.gap_w;
    for (int64_t c = 0; c < count; ++c, source += channel)
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t k = 0; k < taps; ++k) {
                const int down = kComponents - !(OneTap || conv.residue[0].f23.has_third(g));
                const int across = kComponents - !(OneTap || conv.across.has_third(k));
                const Sum* at = source + 2 * g * down_step + k * across_step;
                int64_t begin = 0;
                for (int64_t r = 0; r < runs; begin += run[r++].count)
                    store_components(at + run[r].at, down_step, conv.row, across_step, down, across, begin, to);
#pragma GCC unroll 16
                for (int n = 0; n < kComponents2d; ++n)
                    to[n] += n / kComponents < down && n % kComponents < across ? kOcPixels : 0;
            }
}

}  // namespace
}  // namespace ece408
