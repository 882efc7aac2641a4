// Copies with strides: transposes, repetitions, slices and borders.
#include <string.h>

#include "host/thread_pool.h"
#include "network/steps.h"

namespace ece408 {
namespace {

// Elements of a chunk, and its columns where x and y differ in their order: then lines of x stay in
// the cache from row to row.
constexpr int64_t kChunk = 1 << 14, kTile = 64;

// One axis of a copy, as in ece408_strided.
struct Axis {
    int64_t size, first, held, stride;

    bool is_plain() const { return first == 0 && size <= held; }

    // The element of x for element i of y; false if there is none.
    bool find(int64_t border, int64_t i, int64_t* place) const {
        int64_t at = i - first;
        if (border == ECE408_NEAREST) at = least(most(at, 0), held - 1);
        if (border == ECE408_MIRRORED) {
            at = at < 0 ? -at : at;
            at = at >= held ? 2 * (held - 1) - at : at;
        }
        *place = at * stride;
        return at >= 0 && at < held;
    }
};

struct Copy {
    int64_t border;
    float fill;
    int axes = 0;
    Axis axis[ECE408_MOST_AXES];

    // Joins axes that are adjacent in memory.
    explicit Copy(const ece408_strided& of) : border(of.border), fill(static_cast<float>(of.fill)) {
        for (int k = 0; k < ECE408_MOST_AXES; ++k) {
            const Axis next = {of.size[k], of.first[k], of.held[k], of.stride[k]};
            if (next.is_plain() && next.size == 1) continue;
            Axis* const last = axes ? &axis[axes - 1] : nullptr;
            if (last && last->is_plain() && next.is_plain() &&
                next.stride == last->stride * last->size)
                last->held = last->size *= next.size;
            else
                axis[axes++] = next;
        }
        while (axes < 2) axis[axes++] = {1, 0, 1, 0};
    }

    // Copies elements [from, to) of a row.
    void copy_row(const float* x, int64_t from, int64_t to, float* y) const {
        const Axis& a = axis[0];
        const int64_t begin = least(most(a.first, from), to);
        const int64_t end = least(most(a.first + a.held, begin), to);
        const auto copy_border = [&](int64_t i, int64_t last) {
            for (int64_t place; i < last; ++i) y[i] = a.find(border, i, &place) ? x[place] : fill;
        };
        copy_border(from, begin);
        copy_border(end, to);
        if (begin == end) return;
        const float* source = x + (begin - a.first) * a.stride;
        if (a.stride == 1) {
            memcpy(y + begin, source, static_cast<size_t>(end - begin) * sizeof(float));
        } else {
            for (int64_t i = begin; i < end; ++i, source += a.stride) y[i] = *source;
        }
    }

    // Copies elements [from, to) of rows [begin, end).
    void copy_rows(const float* x, int64_t begin, int64_t end, int64_t from, int64_t to,
                   float* y) const {
        for (int64_t row = begin, run; row < end; row += run) {
            // Rows along axis 1, which the other axes share.
            const int64_t first = row % axis[1].size;
            run = least(end - row, axis[1].size - first);
            int64_t at = 0, place, rest = row / axis[1].size;
            bool is_inside = true;
            for (int k = 2; k < axes; rest /= axis[k].size, ++k) {
                is_inside = axis[k].find(border, rest % axis[k].size, &place) && is_inside;
                at += place;
            }
            for (int64_t i = first; i < first + run; ++i) {
                float* const target = y + (row + i - first) * axis[0].size;
                if (axis[1].find(border, i, &place) && is_inside)
                    copy_row(x + at + place, from, to, target);
                else
                    for (int64_t k = from; k < to; ++k) target[k] = fill;
            }
        }
    }
};

}  // namespace

int copy_strided(const Step& step) {
    const ece408_strided& of = step.of.of.strided;
    const float* const x = input(step, 0);
    float* const y = output(step);
    if (of.elements < 1) return ECE408_OK;
    const Copy copy(of);
    const int64_t width = copy.axis[0].size, rows = of.elements / width;
    const int64_t tile = least(width, copy.axis[1].stride == 1 ? kTile : kChunk);
    const int64_t tall = most(kChunk / tile, 1), across = parts_of(width, tile);
    const int threads = useful_threads(step, of.elements, 1);
    parallel_for(threads, parts_of(rows, tall) * across, [&](int64_t part, int) {
        const int64_t begin = part / across * tall, from = part % across * tile;
        copy.copy_rows(x, begin, least(rows, begin + tall), from, least(width, from + tile), y);
    });
    return ECE408_OK;
}

}  // namespace ece408
