// The padded source of conv_fwd_oc.h, plain or as row components.
#pragma once

#include "conv/oc_plan.h"

namespace ece408 {
namespace {

// Prefetch distance in source pixels while copying. Hardware prefetchers are too late for images of
// many short rows.
constexpr int64_t kSourcePrefetch = 2048;

// Prefetches the pixels that are copied kSourcePrefetch later than these rows of a channel.
template <class T, class Sum>
inline void OcPlan<T, Sum>::prefetch_source(const T* source, int64_t first, int64_t rows) const {
    const T* const ahead = source + first * conv.width + kSourcePrefetch;
    constexpr int64_t kInLine = kLine * sizeof(float) / sizeof(T);
    for (int64_t k = 0; k < rows * conv.width; k += kInLine) __builtin_prefetch(ahead + k, 0, 2);
}

// Stores rows [begin, end) of a channel's components, one component below the other.
template <class T, class Sum>
inline void OcPlan<T, Sum>::transform(const T* source, int64_t begin, int64_t end, Sum* out) const {
    for (int64_t r = 0; r < conv.residues; ++r) {
        const Residue& residue = conv.residue[r];
        ComponentShape shape = {conv.left, conv.width, conv.step_w, conv.row, residue.f23.is_single(), {}};
        for (int t = 0; t < kComponents; ++t)
            shape.places[t] = residue.f23.groups_in(t) ? residue.place(t) * conv.starts * row() : -1;
        for (int64_t start = begin; start < end; ++start) {
            // Vectors write beyond a row, where another component may begin.
            const bool ends = (conv.starts - start) * row() < round_up(row(), kLanes);
            if (conv.along_columns) {
                prefetch_source(source, start, 1);
                column_components(shape, source + start * conv.width, ends, out + start * row());
                continue;
            }
            if (r == 0)
                prefetch_source(source, conv.first_of(start) * conv.stride_h - conv.top,
                                2 * conv.stride_h);
            const T* d[4];
            for (int64_t n = 0; n < 4; ++n) {
                const int64_t y = (conv.first_of(start) + n * conv.gap_h) * conv.stride_h + r - conv.top;
                d[n] = y >= 0 && y < conv.height ? source + y * conv.width : nullptr;
            }
            row_components(shape, d, ends, out + start * row());
        }
    }
}

template <class T, class Sum>
inline RowRange OcPlan<T, Sum>::all_rows() const {
    return {0, conv.winograd && !conv.winograd_2d ? conv.starts : conv.rows};
}

// Rows that pixels [begin, end) of an image's only phase are computed from.
template <class T, class Sum>
inline RowRange OcPlan<T, Sum>::rows_of(int64_t begin, int64_t end) const {
    const int64_t columns = conv.phase[0].columns, last = (end - 1) / columns;
    if (conv.winograd_2d) {
        const int64_t groups = conv.residue[0].f23.groups;
        return {conv.first_of(begin / columns), conv.first_of(last) + (2 * groups + 1) * conv.gap_h + 1};
    }
    if (conv.winograd) return {begin / columns, last + conv.starts - conv.row_pairs + 1};
    const OcTap& lowest = conv.tap[conv.window - 1];  // taps are in the order of rows
    return {begin / columns * conv.step_h, last * conv.step_h + conv.top + lowest.down + 1};
}

// Stores some rows of a channel with its border; within a row, one column residue after the other.
template <class T, class Sum>
inline void OcPlan<T, Sum>::pad(const T* source, const RowRange& rows, Sum* out) const {
    if (conv.winograd && !conv.winograd_2d) return transform(source, rows.begin, rows.end, out);
    const RowShape first = row_shape(0), second = row_shape(conv.step_w > 1 ? 1 : 0);
    const RowCopy<T, Sum> copy_first{first}, copy_second{second};
    const Sum* const end = out + channel();
    const int64_t vectors = (conv.step_w - 1) * conv.row + round_up(conv.row, kLanes);
    const bool is_dilated = conv.winograd_2d && conv.gap_w > 1;
    out += rows.begin * row();
    for (int64_t y = rows.begin; y < rows.end; ++y, out += row()) {
        const int64_t from = y - conv.top;
        prefetch_source(source, from, 1);
        const T* const own = source + from * conv.width - conv.left;
        if (from < 0 || from >= conv.height) {
            memset(out, 0, static_cast<size_t>(row()) * sizeof(Sum));
        } else if (is_dilated) {
            pad_dilated(source + from * conv.width, out);
        } else if (conv.step_w <= 2 && end - out >= vectors) {
            copy_first(own, out);
            if (conv.step_w == 2) copy_second(own + 1, out + conv.row);
        } else {  // vectors would overwrite the next channel, which another thread writes
            for (int64_t n = 0; n < conv.step_w; ++n)
                copy_pixels(row_shape(n), own + n, out + n * conv.row);
        }
    }
}

// A row for F(2,3) in two dimensions with dilated columns: the first columns of all pairs, then the
// second ones.
template <class T, class Sum>
inline void OcPlan<T, Sum>::pad_dilated(const T* source, Sum* out) const {
    const int64_t gap = conv.gap_w;
    for (int64_t second = 0; second < 2; ++second)
        for (int64_t k = 0; k < conv.row; k += gap, out += gap) {
            const int64_t column = 2 * k + second * gap - conv.left;
            if (column >= 0 && column + gap <= conv.width)
                for (int64_t n = 0; n < gap; ++n) out[n] = static_cast<Sum>(source[column + n]);
            else
                for (int64_t n = 0; n < gap; ++n) {
                    const bool is_there = column + n >= 0 && column + n < conv.width;
                    out[n] = is_there ? static_cast<Sum>(source[column + n]) : Sum(0);
                }
        }
}

// Shape of the row of column residue `n`; the source begins at column n - left.
template <class T, class Sum>
inline RowShape OcPlan<T, Sum>::row_shape(int64_t n) const {
    const auto before = [&](int64_t column) {  // steps that begin before `column`
        return column <= n ? 0 : (column - n + conv.step_w - 1) / conv.step_w;
    };
    return {conv.step_w, before(conv.left), before(conv.left + conv.width), conv.row};
}

}  // namespace
}  // namespace ece408
