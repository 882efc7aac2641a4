// Microkernel of conv_fwd_oc.h: the register tile, and pixels laid out for it.
#pragma once

#include "conv/oc_geometry.h"
#include "micro/lanes.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// Numbers that are read soon, of which each product asks for a line, `step` numbers after the last one's. All
// at once would hold up the products.
template <class Sum>
struct WeightPrefetch {
    const Sum* first;
    int64_t step;
};

// sum + w * *x, where products may be one instruction each.
template <class Sum, class V>
V add_one(V w, const Sum* x, V sum) {
    return sum + w * Lanes<Sum>::broadcast(*x);
}
#if ECE408_LANES == 16
inline Vec add_one(Vec w, const float* x, Vec sum) { return multiply_add_one(w, x, sum); }
#endif

// Sums of `count` products for P pixels that lie side by side, and Q of another row, `apart` behind the first of
// them, in all places that `taps` says, which has kPrefetchDistance more. Of P pixels that are laid out, PACKED, those of a
// product lie `apart` behind the last one's.
template <class Sum, int MV, int P, int Q, bool PACKED>
__attribute__((noinline)) void oc_tile(const Sum* pixels, int64_t apart, const int64_t* taps, int64_t count,
                                         const Sum* weight, WeightPrefetch<Sum> ahead, bool add, Sum* out) {
    using L = Lanes<Sum>;
    typename L::Vec sum[P + Q][MV] = {};
    for (int64_t t = 0; t < count; ++t) {
        // An address of one register each: of two, it would be an instruction of its own in each product.
        const Sum* const at = PACKED ? pixels : hidden(pixels + taps[t]);
        const Sum* const second = Q ? hidden(at + apart) : at;
        // With vectors of 16 lanes the first cache is full of the weights that are read, and a product takes
        // long enough to ask for pixels as well.
        __builtin_prefetch(ahead.first, 0, ECE408_LANES == 16 ? 2 : 3);
        ahead.first += ahead.step;
        if (ECE408_LANES == 16) {
            const Sum* const prefetched = pixels + (PACKED ? kPrefetchDistance * apart : taps[t + kPrefetchDistance]);
            __builtin_prefetch(prefetched, 0, 3);
            if (!PACKED) __builtin_prefetch(prefetched + (Q ? apart + Q : P) - 1, 0, 3);
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
            for (int v = 0; v < MV; ++v) sum[p][v] = by_one ? add_one(w[v], from, sum[p][v]) : sum[p][v] + w[v] * x;
        }
        if (PACKED) pixels += apart;
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
using OcTile = void (*)(const Sum*, int64_t, const int64_t*, int64_t, const Sum*, WeightPrefetch<Sum>, bool, Sum*);

// Where a tile's pixels lie: in one row, as many in each of two, kOcPixels in two, or laid out.
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

// For so many vectors of filters, and pixels of one row, or of two; or for those of a row that are laid out.
template <class Sum>
OcTile<Sum> pick_oc_tile(int64_t vectors, int64_t first, int64_t second, bool packed_pixels) {
    return vectors == 1 ? pick_oc_rows<Sum, 1>(first, second, packed_pixels)
                        : pick_oc_rows<Sum, 2>(first, second, packed_pixels);
}

// Vectors that hold a tile's pixels.
template <class Sum>
constexpr int64_t kRunVectors = (kOcPixels + Lanes<Sum>::count - 1) / Lanes<Sum>::count;

// Pixels that lie side by side in a row, from the place of the source's first tap on.
struct PixelRun {
    int64_t at, count;
};

// A tile's pixels as [product][pixel], from each product's place in the source. RUNS: of the pixels, or 0
// for any number. Whole vectors are copied, of which the next ones overwrite what is no pixel.
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

// Some squares in a row of the source, whose rows lie `row` apart, as vectors of each domain to `to`, of
// which the last ones are left out that have no third tap. The second of their four columns lie `odd` behind the
// first, the other two `next` behind these.
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

// A tile's squares as [product][pixel] of each domain, at `places`, for `count` channels of the source,
// `channel` apart.
template <bool OneTap, class Sum>
void transform_pixels(const OcConv& conv, const Sum* source, int64_t channel, int64_t row, int64_t count,
                     const PixelRun* run, int64_t runs, Sum* const* places) {
    Sum* to[kComponents2d];  // which no store changes
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
