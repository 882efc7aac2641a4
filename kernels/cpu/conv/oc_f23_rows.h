// Input transform of conv_fwd_oc.h: Winograd F(2,3) along rows or columns of images.
#pragma once

#include "conv/oc_geometry.h"
#include "micro/vector.h"
#include "micro/winograd_f23.h"

namespace ece408 {
namespace {

// How four rows (or columns) of an image become one row of each stored component. Column k of the
// padded row, for k in [left, left + width), goes to places[component] + k % step * row + k / step.
struct ComponentShape {
    int64_t left, width, step, row;
    bool is_single;
    int64_t places[kComponents];  // negative if not stored
};

template <class V>
void transform_kept(const ComponentShape& s, const V* d, V* z) {
    if (!s.is_single) return transform_input(d[0], d[1], d[2], d[3], z, 1);
    z[0] = d[0], z[3] = d[1];
}

// Scalar transform along rows, from column `begin` of each column residue on; null rows are zeros.
template <class T, class Sum>
void row_components_scalar(const ComponentShape& s, const T* const* rows, int64_t begin, Sum* out) {
    for (int64_t k = begin * s.step; k < s.row * s.step; ++k) {
        const bool is_there = k >= s.left && k < s.left + s.width;
        Sum d[4], z[kComponents] = {};
        for (int r = 0; r < 4; ++r)
            d[r] = is_there && rows[r] ? static_cast<Sum>(rows[r][k - s.left]) : Sum(0);
        transform_kept(s, d, z);
        for (int n = 0; n < kComponents; ++n)
            if (s.places[n] >= 0) out[s.places[n] + k % s.step * s.row + k / s.step] = z[n];
    }
}

// `ends`: nothing may be written behind the row.
template <class T, class Sum>
void row_components(const ComponentShape& s, const T* const* rows, bool, Sum* out) {
    row_components_scalar(s, rows, 0, out);
}

// Scalar transform along columns, from column `begin` of a component on.
template <class T, class Sum>
void column_components_scalar(const ComponentShape& s, const T* row, int64_t begin, Sum* out) {
    for (int64_t k = begin; k < s.row; ++k) {
        Sum d[4], z[kComponents];
        for (int n = 0; n < 4; ++n) {
            const int64_t column = 2 * k + n - s.left;
            d[n] = column >= 0 && column < s.width ? static_cast<Sum>(row[column]) : Sum(0);
        }
        transform_input(d[0], d[1], d[2], d[3], z, 1);
        for (int n = 0; n < kComponents; ++n)
            if (s.places[n] >= 0) out[s.places[n] + k] = z[n];
    }
}

template <class T, class Sum>
void column_components(const ComponentShape& s, const T* row, bool, Sum* out) {
    column_components_scalar(s, row, 0, out);
}

#if ECE408_LANES > 4
// Deinterleaves consecutive vectors: one vector for each residue.
inline void split_residues(Vec (&)[1]) {}
inline void split_residues(Vec (&v)[2]) {
    const Vec even = even_lanes(v[0], v[1]);
    v[1] = odd_lanes(v[0], v[1]);
    v[0] = even;
}
inline void split_residues(Vec (&v)[4]) {
    Vec first[2] = {v[0], v[1]}, second[2] = {v[2], v[3]};
    split_residues(first), split_residues(second);
    v[0] = even_lanes(first[0], second[0]), v[2] = odd_lanes(first[0], second[0]);
    v[1] = even_lanes(first[1], second[1]), v[3] = odd_lanes(first[1], second[1]);
}

// Lanes of a vector from padded column `at` on that are in the image.
inline Mask lanes_inside(const ComponentShape& s, int64_t at) {
    const auto lane = [&](int64_t column) {
        return static_cast<int>(column < at ? 0 : column > at + kLanes ? kLanes : column - at);
    };
    return lanes_between(lane(s.left), lane(s.left + s.width));
}

// Transforms the first `vectors` columns of each of S residues, in whole vectors.
template <int S>
void row_components_vectors(const ComponentShape& s, const float* const* rows, int64_t vectors, float* out) {
    for (int64_t k = 0; k < vectors; k += kLanes) {
        Vec kept[kComponents][S];
        for (int v = 0; v < S; ++v) {
            const int64_t at = S * k + v * kLanes;
            const Mask inside = lanes_inside(s, at);
            Vec d[4], z[kComponents] = {};
            for (int r = 0; r < 4; ++r)
                d[r] = rows[r] ? load_only(inside, rows[r] + at - s.left) : broadcast(0.0f);
            transform_kept(s, d, z);
            for (int n = 0; n < kComponents; ++n) kept[n][v] = z[n];
        }
        for (int n = 0; n < kComponents; ++n) {
            if (s.places[n] < 0) continue;
            split_residues(kept[n]);
            for (int v = 0; v < S; ++v) store(out + s.places[n] + v * s.row + k, kept[n][v]);
        }
    }
}

inline void row_components(const ComponentShape& s, const float* const* rows, bool ends, float* out) {
    if (s.step == 3 || s.step > 4) return row_components_scalar(s, rows, 0, out);
    const int64_t vectors = (ends ? s.row : round_up(s.row, kLanes)) / kLanes * kLanes;
    (s.step == 1   ? row_components_vectors<1>
     : s.step == 2 ? row_components_vectors<2>
                   : row_components_vectors<4>)(s, rows, vectors, out);
    row_components_scalar(s, rows, vectors, out);
}

// Pixels of a row from padded column `column` on.
inline Vec pixels_from(const ComponentShape& s, const float* row, int64_t column) {
    return load_only(lanes_inside(s, column), row + column - s.left);
}

inline void column_components(const ComponentShape& s, const float* row, bool ends, float* out) {
    const int64_t vectors = (ends ? s.row : round_up(s.row, kLanes)) / kLanes * kLanes;
    for (int64_t k = 0; k < vectors; k += kLanes) {
        const Vec first = pixels_from(s, row, 2 * k), second = pixels_from(s, row, 2 * k + kLanes);
        const Vec third = pixels_from(s, row, 2 * k + 2), fourth = pixels_from(s, row, 2 * k + 2 + kLanes);
        Vec z[kComponents];
        transform_input(even_lanes(first, second), odd_lanes(first, second), even_lanes(third, fourth),
                        odd_lanes(third, fourth), z, 1);
        for (int n = 0; n < kComponents; ++n)
            if (s.places[n] >= 0) store(out + s.places[n] + k, z[n]);
    }
    column_components_scalar(s, row, vectors, out);
}
#endif

}  // namespace
}  // namespace ece408
