// Register tiles of depthwise convolutions: some output rows by one vector of columns. Each vector
// of an input row is loaded once for all output rows that use it, and nothing is copied.
//
// Pixels beyond a row's ends are loaded and masked out of the products; without masked products, or
// where loads would leave the array, the loads are masked. Rows in the border read a row of zeros.
// Both count as multiplied by zero, so other kernels compute with weights that are not all finite.
// If rows are at most half a vector wide, a vector holds two adjacent rows.
//
// With stride 2, two vectors are loaded, whose even and odd lanes are two taps. Most of these loads
// cross a cache line, which takes two accesses, so the third tap of 3 is another tap shifted by a
// lane. With dilation, the rows of a tile are as far apart as the taps.
#pragma once

#include "api/shape.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// Output rows of a tile.
constexpr int kMostRows = ECE408_LANES == 4 ? 6 : 8;
constexpr int kMostKernel = 5;
// Rows in a vector.
constexpr int kMostPacked = kMasksProducts ? 2 : 1;

// A convolution of planes: the problem's, or the gradient for x as a convolution.
struct Layer {
    Shape shape;
    int64_t top, left;  // border; may be negative
    const float* weights;
    bool rotated;

    int64_t planes() const { return shape.batch * shape.filters; }
    int64_t source(int64_t plane) const { return plane / shape.group_filters; }
};

inline int clamp_lane(int64_t lane) {
    return static_cast<int>(lane < 0 ? 0 : lane > kLanes ? kLanes : lane);
}

// Lanes of a vector from column `at` on that are inside a row.
inline Mask lanes_in(int64_t width, int64_t at) {
    return lanes_between(clamp_lane(-at), clamp_lane(width - at));
}

// Vectors loaded for the K taps of a row: one per tap with stride 1, two per pair of taps with
// stride 2.
template <int K, int S>
constexpr int kLoads = S == 1 ? K : K + 1;

// First column of such a load, relative to the first tap.
inline int64_t load_column(int load, int64_t stride, int64_t dilate) {
    return stride == 1 ? load * dilate : load / 2 * 2 + load % 2 * kLanes;
}

// A vector of pixels from column `at` on, with zeros outside the row unless `Inside`.
template <bool Inside>
__attribute__((always_inline)) inline Vec pixels(const float* row, int64_t at, Mask inside) {
    return Inside ? load(row + at) : load_only(inside, row + at);
}

template <int K, int S, bool Inside>
__attribute__((always_inline)) inline void load_taps(const float* row, int64_t dilate,
                                                     const Mask (&inside)[kLoads<K, S>],
                                                     Vec (&tap)[K]) {
#if ECE408_LANES == 16
    if (Inside && K == 3 && S == 2) {
        const Vec first = load(row + 1), second = load(row + 1 + kLanes);
        tap[1] = even_lanes(first, second);
        tap[2] = odd_lanes(first, second);
        tap[0] = moved_up(tap[2], row[0]);
        return;
    }
#endif
    if constexpr (S == 1) {
        ECE408_UNROLL
        for (int q = 0; q < K; ++q) tap[q] = pixels<Inside>(row, q * dilate, inside[q]);
    } else {
        ECE408_UNROLL
        for (int q = 0; q < K; q += 2) {
            const Vec first = pixels<Inside>(row, q, inside[q]);
            const Vec second = pixels<Inside>(row, q + kLanes, inside[q + 1]);
            tap[q] = even_lanes(first, second);
            if (q + 1 < K) tap[q + 1] = odd_lanes(first, second);
        }
    }
}

// A vector of output columns: whether all its loads are inside the rows; if not, the valid lanes of
// its taps or, without masked products, of its loads.
struct Column {
    bool inside;
    Mask mask[kMostKernel + 1];
};

// Common to all tiles of a call.
struct Call {
    Layer layer;
    const float *x, *x_end;
    const float* bias;
    ece408_epilogue epilogue;
    float* y;
    bool accumulate;
    const float* zeros;  // a row, with room for loads beyond its ends
    const Column* columns;
    int64_t reach;                    // end of a row's loads, relative to its first pixel
    int64_t packed;                   // rows in a vector; if two,
    Mask below_border, above_border;  // the lanes of the second row, and of the first
    int64_t classes;                  // classes of rows that are dilate_h apart
    int64_t rows, one_more;           // vectors of packed rows per class; classes that have one more
    int64_t tile_rows, tiles;         // of the largest class
    int64_t ahead_lines;              // cache lines of the next tile's rows that each vector of columns prefetches
    bool streams;                     // non-temporal stores: every vector is a line
    bool goes_down;                   // planes are computed in bands
};

// Valid lanes of load `n` for the outputs from column j on.
inline Mask load_inside(const Call& call, int64_t j, int n) {
    const Shape& s = call.layer.shape;
    const int64_t at = j * s.stride_w - call.layer.left + load_column(n, s.stride_w, s.dilate_w);
    if (call.packed == 1) return lanes_in(s.width, at);
    return lanes_where([&](int64_t lane) {
        const int64_t column = lane % s.width + at;
        return lane < call.packed * s.width && column >= 0 && column < s.width;
    });
}

// Valid lanes of tap q.
inline Mask tap_inside(const Call& call, int64_t j, int q) {
    const Shape& s = call.layer.shape;
    if (s.stride_w == 1) return load_inside(call, j, q);
    const int64_t at = j * s.stride_w - call.layer.left + q;
    return lanes_between(clamp_lane((1 - at) >> 1), clamp_lane((s.width - at + 1) >> 1));
}

inline Column column_from(const Call& call, int64_t j) {
    const Shape& s = call.layer.shape;
    const int taps = static_cast<int>(s.kernel_w), loads = s.stride_w == 1 ? taps : taps + 1;
    const int64_t at = j * s.stride_w - call.layer.left;
    const int64_t end = at + load_column(loads - 1, s.stride_w, s.dilate_w) + kLanes;
    Column column = {};
    column.inside = call.packed == 1 && j + kLanes <= s.out_width && at >= 0 && end <= s.width;
    for (int n = 0; n < (kMasksProducts ? taps : loads); ++n)
        column.mask[n] = kMasksProducts ? tap_inside(call, j, n) : load_inside(call, j, n);
    return column;
}

// A plane with its weights and epilogue.
template <int K>
struct Plane {
    const float* image;
    float* y;
    Vec weight[K * K], bias, factor, addend, lowest, highest;
    bool has_epilogue;

    __attribute__((always_inline)) Plane(const Call& call, int64_t plane) {
        const Shape& s = call.layer.shape;
        const int64_t filter = plane % s.filters;
        image = call.x + call.layer.source(plane) * s.height * s.width;
        y = call.y + plane * s.out_height * s.out_width;
        const float* const w = call.layer.weights + filter * K * K;
        ECE408_UNROLL
        for (int k = 0; k < K * K; ++k)
            weight[k] = broadcast(w[call.layer.rotated ? K * K - 1 - k : k]);
        bias = broadcast(call.bias ? call.bias[filter] : 0.0f);
        has_epilogue = call.epilogue.factors != nullptr;
        if (!has_epilogue) return;
        factor = broadcast(call.epilogue.factors[filter]);
        addend = broadcast(call.epilogue.addends[filter]);
        lowest = broadcast(call.epilogue.lowest), highest = broadcast(call.epilogue.highest);
    }
};

// R output rows, or vectors of P rows each. The first `skipped` are stored already.
struct Tile {
    int64_t from;  // input row of the first window
    float* y;
    int64_t row_step;  // between output rows, or vectors of rows
    int64_t limit;     // outputs from y on that belong to the tile
    int64_t skipped;
    bool guarded;        // loads beyond rows' ends would leave the array
    const float* ahead;  // data to prefetch
};

// `Whole`: no row ends within the vectors.
template <int R, int P, bool Whole>
__attribute__((always_inline)) inline void store_rows(const Call& call, const Tile& t, int64_t j,
                                                      const Vec (&sum)[R]) {
    const Shape& s = call.layer.shape;
#if ECE408_STREAMS
    if (call.streams) {
        ECE408_UNROLL
        for (int r = 0; r < R; ++r)
            if (r >= t.skipped) stream(t.y + r * t.row_step + j, sum[r]);
        return;
    }
#endif
    const int64_t wide = P * s.out_width - j;
    ECE408_UNROLL
    for (int r = 0; r < R; ++r) {
        if (r < t.skipped) continue;
        float* const to = t.y + r * t.row_step + j;
        const int64_t left = t.limit - r * t.row_step - j;
        // Surplus beyond a row's end is overwritten by the next row.
        // Of the last vector of rows, some rows may be beyond the plane.
        const bool is_inside = Whole || (P == 1 && wide >= kLanes);
        if (!call.accumulate && (is_inside || (left >= kLanes && s.dilate_h == 1)))
            store(to, sum[r]);
        else
            put_lanes(0, Whole ? kLanes : clamp_lane(left < wide ? left : wide), to, sum[r],
                      call.accumulate);
    }
}

// Masks of a vector of columns: none, of its products, or of its loads.
enum Masks { kNoMasks, kOfProducts, kOfLoads };

// Computes the vector of columns from column j on.
template <int K, int S, int P, int R, Masks M>
__attribute__((always_inline)) inline void run_columns(const Call& call, const Plane<K>& plane,
                                                       const Tile& t, const Mask* mask, int64_t j) {
    const Shape& s = call.layer.shape;
    const int64_t at = j * S - call.layer.left;
    Mask inside[kLoads<K, S>] = {};
    ECE408_UNROLL
    for (int n = 0; n < (M == kOfLoads ? kLoads<K, S> : M == kOfProducts ? K : 0); ++n)
        inside[n] = mask[n];
    Vec sum[R];
    ECE408_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = plane.bias;
    int64_t from = t.from;
    const float* row = plane.image + from * s.width + at;
    const int64_t step = s.dilate_h * s.width;
    ECE408_UNROLL
    for (int h = 0; h < (R - 1) * S * P + K; ++h, from += s.dilate_h, row += step) {
        Vec tap[K];
        if (P > 1 && (from < 0 || from > s.height - P)) {
            if (from <= -P || from >= s.height) continue;
            const Mask rows = from < 0 ? call.below_border : call.above_border;
            ECE408_UNROLL
            for (int q = 0; q < K; ++q) tap[q] = load_only(mask[q] & rows, row + q);
        } else {
            const bool there = P > 1 || (from >= 0 && from < s.height);
            load_taps<K, S, M != kOfLoads>(there ? row : call.zeros + at, s.dilate_w, inside, tap);
        }
        ECE408_UNROLL
        for (int r = 0; r < R; ++r) {
            const int p = h - r * S * P;
            if (p < 0 || p >= K) continue;
            ECE408_UNROLL
            for (int q = 0; q < K; ++q) {
                const Vec weight = plane.weight[p * K + q];
                sum[r] = M == kOfProducts ? multiply_add_only(inside[q], tap[q], weight, sum[r])
                                          : multiply_add(tap[q], weight, sum[r]);
            }
        }
    }
    if (plane.has_epilogue) {
        ECE408_UNROLL
        for (int r = 0; r < R; ++r)
            sum[r] = bounded(multiply_add(sum[r], plane.factor, plane.addend), plane.lowest,
                             plane.highest);
    }
    store_rows<R, P, M == kNoMasks>(call, t, j, sum);
}

template <int K, int S, int P, int R>
__attribute__((always_inline)) inline void run_tile(const Call& call, const Plane<K>& plane,
                                                    const Tile& t) {
    constexpr Masks kEnd = kMasksProducts ? kOfProducts : kOfLoads;
    const int64_t vectors = divide_up(call.layer.shape.out_width, kLanes);
    // The end first: its surplus reaches into the next row, which is written later.
    for (int64_t i = 0, v = vectors - 1; i < vectors; v = i++) {
        const int64_t j = v * kLanes;
        for (int64_t line = 0; line < call.ahead_lines; ++line)
            prefetch(t.ahead + (v * call.ahead_lines + line) * kLine);
        const Column& column = call.columns[v];
        if (kMasksProducts && t.guarded) {
            Mask mask[kLoads<K, S>];
            for (int n = 0; n < kLoads<K, S>; ++n) mask[n] = load_inside(call, j, n);
            run_columns<K, S, P, R, kOfLoads>(call, plane, t, mask, j);
        } else if (P == 1 && column.inside) {
            run_columns<K, S, 1, R, kNoMasks>(call, plane, t, nullptr, j);
        } else {
            run_columns<K, S, P, R, kEnd>(call, plane, t, column.mask, j);
        }
    }
}

// Tile `number` of the class that begins with row `first` and has `rows` rows.
template <int K, int S, int P, int R>
__attribute__((always_inline)) inline Tile tile_of(const Call& call, const Plane<K>& plane,
                                                   int64_t first, int64_t rows, int64_t number) {
    const Layer& layer = call.layer;
    const Shape& s = layer.shape;
    const int64_t start = number * R + R < rows ? number * R : rows - R;
    const int64_t y_row = first + start * P * s.dilate_h;
    Tile t;
    t.from = y_row * S - layer.top;
    t.y = plane.y + y_row * s.out_width;
    t.row_step = P * s.dilate_h * s.out_width;
    const int64_t left = (s.out_height - y_row) * s.out_width;
    t.limit = left < R * t.row_step ? left : R * t.row_step;
    t.skipped = number * R - start;
    const int64_t last = t.from + ((R - 1) * S * P + K - 1) * s.dilate_h + P - 1;
    const int64_t lowest = t.from < 0 ? 0 : t.from, highest = last < s.height ? last : s.height - 1;
    t.guarded = plane.image + lowest * s.width - layer.left < call.x ||
                plane.image + highest * s.width + call.reach > call.x_end;
    t.ahead = plane.image + (last + 1) * s.width;
    return t;
}

// Computes tiles [first, last) of every class of rows, for planes [begin, end).
template <int K, int S, int P, int R>
void run_planes(const Call& call, int64_t begin, int64_t end, int64_t first, int64_t last) {
    for (int64_t number = begin; number < end; ++number) {
        const Plane<K> plane(call, number);
        for (int64_t row = 0; row < call.classes; ++row) {
            const int64_t rows = call.rows + (row < call.one_more);
            for (int64_t tile = first; tile < last && tile * R < rows; ++tile)
                run_tile<K, S, P, R>(call, plane, tile_of<K, S, P, R>(call, plane, row, rows, tile));
        }
    }
}

using RunPlanes = void(const Call&, int64_t, int64_t, int64_t, int64_t);

template <int K, int S, int P, int R = kMostRows>
RunPlanes* pick_rows(int64_t rows) {
    if constexpr (R > 1) {
        if (rows < R) return pick_rows<K, S, P, R - 1>(rows);
    }
    return run_planes<K, S, P, R>;
}

template <int K>
RunPlanes* pick_planes(const Call& call) {
    if constexpr (kMostPacked > 1) {
        if (call.packed > 1) return pick_rows<K, 1, kMostPacked>(call.tile_rows);
    }
    if (call.layer.shape.stride_h == 1) return pick_rows<K, 1, 1>(call.tile_rows);
    return pick_rows<K, 2, 1>(call.tile_rows);
}

}  // namespace
}  // namespace ece408
