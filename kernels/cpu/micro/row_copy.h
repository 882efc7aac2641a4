// Copies rows of an image with zeros around them, or every n-th pixel of them.
#pragma once

#include <stdint.h>

#include "micro/vector.h"

namespace ece408 {
namespace {

// Rows of one shape: `out[k]` becomes `source[k * step]` for k in [begin, end), and zero elsewhere
// below `count`. `source` may point outside its array: only those pixels are read. Whole vectors
// are written, so up to a vector less one of zeros may follow.
struct RowShape {
    int64_t step, begin, end, count;

    bool reads() const { return begin < end; }
};

template <class T, class Sum>
void copy_pixels(const RowShape& row, const T* source, Sum* out) {
    for (int64_t k = 0; k < row.begin; ++k) out[k] = 0;
    if (row.step == 1)
        for (int64_t k = row.begin; k < row.end; ++k) out[k] = source[k];
    else
        for (int64_t k = row.begin; k < row.end; ++k) out[k] = source[k * row.step];
    for (int64_t k = row.end; k < row.count; ++k) out[k] = 0;
}

template <class T, class Sum>
struct RowCopy {
    RowShape row;

    void operator()(const T* source, Sum* out) const { copy_pixels(row, source, out); }
};

#if ECE408_LANES > 4
// Steps of one, two and four by vectors. The vectors with the row's first and last pixel are
// masked.
template <>
struct RowCopy<float, float> {
    RowShape row;
    int64_t last;           // where the vector with the last pixel begins
    Mask head[4], tail[4];  // lanes of the source vectors, one per step

    RowCopy(const RowShape& shape) : row(shape) {
        last = row.begin < row.end ? (row.end - 1) / kLanes * kLanes : 0;
        // Pixels behind the last one may be outside the array.
        const int64_t begin = row.step * row.begin, end = row.step * (row.end - 1) + 1;
        for (int v = 0; v < 4; ++v) {
            head[v] = lanes_of(begin, end, v * kLanes);
            tail[v] = lanes_of(begin, end, row.step * last + v * kLanes);
        }
    }
    void operator()(const float* source, float* out) const {
        if (row.begin == row.end)
            zeros(0, out);
        else if (row.step == 3 || row.step > 4 || row.begin >= kLanes)
            copy_pixels(row, source, out);
        else if (row.step == 1)
            copy<1>(source, out);
        else if (row.step == 2)
            copy<2>(source, out);
        else
            copy<4>(source, out);
    }

private:
    // Lanes of a vector from element `at` on that are in [begin, end).
    static Mask lanes_of(int64_t begin, int64_t end, int64_t at) {
        const auto lane = [&](int64_t k) {
            return static_cast<int>(k < at ? 0 : k - at > kLanes ? kLanes : k - at);
        };
        return lanes_between(lane(begin), lane(end));
    }
    template <int S>
    static Vec whole(const float* source) {
        if constexpr (S == 1) return load(source);
        else return even_lanes(whole<S / 2>(source), whole<S / 2>(source + S / 2 * kLanes));
    }
    template <int S>
    static Vec part(const Mask* mask, const float* source) {
        if constexpr (S == 1) return load_only(*mask, source);
        else return even_lanes(part<S / 2>(mask, source), part<S / 2>(mask + S / 2, source + S / 2 * kLanes));
    }
    template <int S>
    void copy(const float* source, float* out) const {
        store(out, part<S>(head, source));
        for (int64_t k = kLanes; k < last; k += kLanes) store(out + k, whole<S>(source + S * k));
        if (last > 0) store(out + last, part<S>(tail, source + S * last));
        zeros(last + kLanes, out);
    }
    void zeros(int64_t from, float* out) const {
        for (int64_t k = from; k < row.count; k += kLanes) store(out + k, broadcast(0.0f));
    }
};
#endif

}  // namespace
}  // namespace ece408
