// Depthwise convolutions of 3x3 in bands: down a column of vectors, with the sums of three rows in
// registers. A tile of depthwise_tiles.h needs more weights and sums than 16 registers hold.
#pragma once

#include "conv/depthwise_tiles.h"

namespace ece408 {
namespace {

constexpr bool kGoesDown = kLanes <= 8;
constexpr int64_t kBandRows = 16;

// Rows [first, end) of an output plane. The epilogue's numbers are stored here: through pointers it
// took an eighth more time.
struct Band {
    int64_t width, height, top, left, out_width;
    float weights[9];
    float bias;
    const float* image;
    float* y;
    bool accumulate, has_epilogue;
    float factor, addend, lowest, highest;
    int64_t first, end;
};

// Columns of a vector of outputs: all windows inside the rows; at the beginning or end of a row;
// fewer than a vector at its end.
enum Columns { kInside, kBorder, kTail };

// Applies the epilogue and stores a vector of sums of row `r`, column j, to `to`.
template <Columns C>
__attribute__((always_inline)) inline void put(const Band& b, int64_t r, int64_t j, float* to,
                                               Vec sum) {
    if (b.has_epilogue)
        sum = bounded(multiply_add(sum, broadcast(b.factor), broadcast(b.addend)),
                      broadcast(b.lowest), broadcast(b.highest));
    if (C != kTail)
        put_lanes(0, kLanes, to, sum, b.accumulate);
    else if (!b.accumulate && (b.end - r) * b.out_width - j >= kLanes)
        store(to, sum);  // the next rows overwrite what goes beyond the row's end
    else
        put_lanes(0, clamp_lane(b.out_width - j), to, sum, b.accumulate);
}

// Computes N vectors of each row, from column j on.
template <int S, Columns C, int N>
__attribute__((noinline)) void run_down(const Band& b, int64_t j) {
    Vec weight[9];
    ECE408_UNROLL
    for (int k = 0; k < 9; ++k) weight[k] = broadcast(b.weights[k]);
    const int64_t at = j * S - b.left;
    Mask inside[N][kLoads<3, S>];
    if constexpr (C != kInside) {
        ECE408_UNROLL
        for (int v = 0; v < N; ++v) {
            ECE408_UNROLL
            for (int n = 0; n < kLoads<3, S>; ++n)
                inside[v][n] = lanes_in(b.width, at + v * S * kLanes + load_column(n, S, 1));
        }
    }
    const Vec bias = broadcast(b.bias);
    // Sums of three rows; the first one lacks only the last row of its windows. With stride 2 there
    // are no sums between the first and the last.
    Vec first[N], second[N], third[N];
    ECE408_UNROLL
    for (int v = 0; v < N; ++v) first[v] = second[v] = bias;
    const int64_t begin = b.first - (S == 1 ? 2 : 1);
    int64_t from = begin * S - b.top + 2;
    const float* row = b.image + from * b.width + at;
    float* to = b.y + begin * b.out_width + j;
    for (int64_t r = begin; r < b.end; ++r, from += S, row += S * b.width, to += b.out_width) {
        const bool there = from >= 0 && from < b.height;
        ECE408_UNROLL
        for (int v = 0; v < N; ++v) {
            third[v] = bias;
            if (!there) continue;
            Vec tap[3];
            load_taps<3, S, C == kInside>(row + v * S * kLanes, 1, inside[v], tap);
            ECE408_UNROLL
            for (int q = 0; q < 3; ++q) {
                first[v] = multiply_add(tap[q], weight[6 + q], first[v]);
                if (S == 1) second[v] = multiply_add(tap[q], weight[3 + q], second[v]);
                third[v] = multiply_add(tap[q], weight[q], third[v]);
            }
        }
        if (r >= b.first) {
            ECE408_UNROLL
            for (int v = 0; v < N; ++v) put<C>(b, r, j, to + v * kLanes, first[v]);
        }
        if (S == 2 && from + 1 >= 0 && from + 1 < b.height) {
            ECE408_UNROLL
            for (int v = 0; v < N; ++v) {
                Vec tap[3];
                load_taps<3, S, C == kInside>(row + b.width + v * S * kLanes, 1, inside[v], tap);
                ECE408_UNROLL
                for (int q = 0; q < 3; ++q)
                    third[v] = multiply_add(tap[q], weight[3 + q], third[v]);
            }
        }
        ECE408_UNROLL
        for (int v = 0; v < N; ++v) {
            first[v] = S == 1 ? second[v] : third[v];
            second[v] = third[v];
        }
    }
}

template <int S>
void run_band(const Band& b) {
    const int64_t whole = b.out_width / kLanes * kLanes;
    const int64_t reach = load_column(kLoads<3, S> - 1, S, 1) + kLanes;
    const auto is_inside = [&](int64_t j) {
        return j * S >= b.left && j * S - b.left + reach <= b.width;
    };
    // The end first, as in depthwise_tiles.h. Two vectors at a time hide the latency of the sums.
    if (whole < b.out_width) run_down<S, kTail, 1>(b, whole);
    for (int64_t j = 0; j < whole;) {
        const bool two = j + 2 * kLanes <= whole && is_inside(j) && is_inside(j + kLanes);
        if (two)
            run_down<S, kInside, 2>(b, j);
        else if (is_inside(j))
            run_down<S, kInside, 1>(b, j);
        else
            run_down<S, kBorder, 1>(b, j);
        j += (two ? 2 : 1) * kLanes;
    }
}

// Computes tiles [first, last) of an output plane.
void run_plane_by_bands(const Call& call, int64_t plane, int64_t first, int64_t last) {
    const Layer& layer = call.layer;
    const Shape& s = layer.shape;
    const int64_t filter = plane % s.filters;
    Band b = {};
    b.width = s.width, b.height = s.height, b.top = layer.top, b.left = layer.left;
    b.out_width = s.out_width;
    for (int64_t k = 0; k < 9; ++k)
        b.weights[k] = layer.weights[filter * 9 + (layer.rotated ? 8 - k : k)];
    b.bias = call.bias ? call.bias[filter] : 0.0f;
    b.image = call.x + layer.source(plane) * s.height * s.width;
    b.y = call.y + plane * s.out_height * s.out_width;
    b.accumulate = call.accumulate, b.has_epilogue = call.epilogue.factors != nullptr;
    b.factor = b.has_epilogue ? call.epilogue.factors[filter] : 1;
    b.addend = b.has_epilogue ? call.epilogue.addends[filter] : 0;
    b.lowest = call.epilogue.lowest, b.highest = call.epilogue.highest;
    const int64_t rows = last * call.tile_rows, end = rows < s.out_height ? rows : s.out_height;
    for (int64_t r = first * call.tile_rows; r < end; r += kBandRows) {
        b.first = r, b.end = r + kBandRows < end ? r + kBandRows : end;
        s.stride_h == 1 ? run_band<1>(b) : run_band<2>(b);
    }
}

// Computes planes [begin, end).
void run_bands(const Call& call, int64_t begin, int64_t end, int64_t first, int64_t last) {
    for (int64_t plane = begin; plane < end; ++plane) run_plane_by_bands(call, plane, first, last);
}

}  // namespace
}  // namespace ece408
