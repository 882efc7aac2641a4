// Padded source of conv_fwd_oc.h.
#pragma once

#include "conv/oc_plan.h"

namespace ece408 {
namespace {

// For some rows of a channel, from row `first` on, what is as many pixels further on as is copied later.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::ask_for(const T* source, int64_t first, int64_t rows) const {
    const T* const ahead = source + first * deep.width + kDeepSourceAhead;
    constexpr int64_t kInLine = kLine * sizeof(float) / sizeof(T);
    for (int64_t k = 0; k < rows * deep.width; k += kInLine) __builtin_prefetch(ahead + k, 0, 2);
}

// A channel's domains, one under the other; of these the rows [begin, end).
template <class T, class Sum>
inline void DeepPlan<T, Sum>::transform(const T* source, int64_t begin, int64_t end, Sum* out) const {
    for (int64_t r = 0; r < deep.residues; ++r) {
        const Residue& residue = deep.residue[r];
        DomainShape shape = {deep.left, deep.width, deep.step_w, deep.row, residue.pairs.is_single(), {}};
        for (int t = 0; t < kDomains; ++t)
            shape.places[t] = residue.pairs.groups_in(t) ? residue.place(t) * deep.starts * row() : -1;
        for (int64_t start = begin; start < end; ++start) {
            // Vectors write behind a row, where the next domain may be.
            const bool ends = (deep.starts - start) * row() < round_up(row(), kLanes);
            if (deep.by_columns) {
                ask_for(source, start, 1);
                column_row(shape, source + start * deep.width, ends, out + start * row());
                continue;
            }
            if (r == 0) ask_for(source, deep.first_of(start) * deep.stride_h - deep.top, 2 * deep.stride_h);
            const T* d[4];
            for (int64_t n = 0; n < 4; ++n) {
                const int64_t y = (deep.first_of(start) + n * deep.apart) * deep.stride_h + r - deep.top;
                d[n] = y >= 0 && y < deep.height ? source + y * deep.width : nullptr;
            }
            domain_row(shape, d, ends, out + start * row());
        }
    }
}

template <class T, class Sum>
inline RowRange DeepPlan<T, Sum>::all_rows() const {
    return {0, deep.by_pairs && !deep.by_squares ? deep.starts : deep.rows};
}

// Those that the pixels [begin, end) of an image's only phase are computed from.
template <class T, class Sum>
inline RowRange DeepPlan<T, Sum>::rows_of(int64_t begin, int64_t end) const {
    const int64_t columns = deep.phase[0].columns, last = (end - 1) / columns;
    if (deep.by_squares) {
        const int64_t groups = deep.residue[0].pairs.groups;
        return {deep.first_of(begin / columns), deep.first_of(last) + (2 * groups + 1) * deep.apart + 1};
    }
    if (deep.by_pairs) return {begin / columns, last + deep.starts - deep.pair_rows + 1};
    const DeepTap& lowest = deep.tap[deep.window - 1];  // taps are in the order of rows
    return {begin / columns * deep.step_h, last * deep.step_h + deep.top + lowest.down + 1};
}

// A channel with its border, some rows of it; of each row, one residue of columns after the other.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::pad(const T* source, const RowRange& rows, Sum* out) const {
    if (deep.by_pairs && !deep.by_squares) return transform(source, rows.begin, rows.end, out);
    const RowShape first = row_shape(0), second = row_shape(deep.step_w > 1 ? 1 : 0);
    const RowCopy<T, Sum> copy_first{first}, copy_second{second};
    const Sum* const end = out + channel();
    const int64_t vectors = (deep.step_w - 1) * deep.row + round_up(deep.row, kLanes);
    const bool is_spread = deep.by_squares && deep.apart_across > 1;
    out += rows.begin * row();
    for (int64_t y = rows.begin; y < rows.end; ++y, out += row()) {
        const int64_t from = y - deep.top;
        ask_for(source, from, 1);
        const T* const own = source + from * deep.width - deep.left;
        if (from < 0 || from >= deep.height) {
            memset(out, 0, static_cast<size_t>(row()) * sizeof(Sum));
        } else if (is_spread) {
            pad_spread(source + from * deep.width, out);
        } else if (deep.step_w <= 2 && end - out >= vectors) {
            copy_first(own, out);
            if (deep.step_w == 2) copy_second(own + 1, out + deep.row);
        } else {  // vectors would write to the next channel, another thread's
            for (int64_t n = 0; n < deep.step_w; ++n)
                copy_pixels(row_shape(n), own + n, out + n * deep.row);
        }
    }
}

// A row for squares whose columns lie apart: the first columns of all, then the second ones.
template <class T, class Sum>
inline void DeepPlan<T, Sum>::pad_spread(const T* source, Sum* out) const {
    const int64_t apart = deep.apart_across;
    for (int64_t second = 0; second < 2; ++second)
        for (int64_t k = 0; k < deep.row; k += apart, out += apart) {
            const int64_t column = 2 * k + second * apart - deep.left;
            if (column >= 0 && column + apart <= deep.width)
                for (int64_t n = 0; n < apart; ++n) out[n] = static_cast<Sum>(widen(source[column + n]));
            else
                for (int64_t n = 0; n < apart; ++n) {
                    const bool is_there = column + n >= 0 && column + n < deep.width;
                    out[n] = is_there ? static_cast<Sum>(widen(source[column + n])) : Sum(0);
                }
        }
}

// The pixels of a row whose columns are the residue `n`, from column n - left on.
template <class T, class Sum>
inline RowShape DeepPlan<T, Sum>::row_shape(int64_t n) const {
    const auto before = [&](int64_t column) {  // steps that begin before it
        return column <= n ? 0 : (column - n + deep.step_w - 1) / deep.step_w;
    };
    return {deep.step_w, before(deep.left), before(deep.left + deep.width), deep.row};
}

}  // namespace
}  // namespace ece408
