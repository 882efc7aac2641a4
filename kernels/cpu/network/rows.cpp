// Copies, and reductions and softmax of rows.
//
// Sums are in double: elements that are adjacent in memory are added to adjacent sums, so that the
// compiler vectorises, in an order that depends on the sizes only.
#include <float.h>
#include <math.h>
#include <string.h>

#include "host/buffer.h"
#include "host/thread_pool.h"
#include "network/exponential.h"
#include "network/steps.h"

namespace ece408 {
namespace {

// Elements that a chunk has at least, and columns that are reduced side by side.
constexpr int64_t kChunk = 1 << 12, kColumns = 64;

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
        if (!axes) axis[axes++] = {1, 0, 1, 0};
    }

    void copy_row(const float* x, float* y) const {
        const Axis& a = axis[0];
        const int64_t begin = least(most(a.first, 0), a.size);
        const int64_t end = least(most(a.first + a.held, begin), a.size);
        const auto copy_border = [&](int64_t from, int64_t to) {
            for (int64_t i = from, place; i < to; ++i)
                y[i] = a.find(border, i, &place) ? x[place] : fill;
        };
        copy_border(0, begin);
        copy_border(end, a.size);
        const float* from = x + (begin - a.first) * a.stride;
        if (begin == end) return;
        if (a.stride == 1) {
            memcpy(y + begin, from, static_cast<size_t>(end - begin) * sizeof(float));
        } else if (a.stride == 0) {
            const float value = *from;
            for (int64_t i = begin; i < end; ++i) y[i] = value;
        } else {
            for (int64_t i = begin; i < end; ++i, from += a.stride) y[i] = *from;
        }
    }

    // Copies rows [begin, end) of y.
    void copy_rows(int64_t begin, int64_t end, const float* x, float* y) const {
        int64_t index[ECE408_MOST_AXES] = {}, rest = begin;
        for (int k = 1; k < axes; ++k) index[k] = rest % axis[k].size, rest /= axis[k].size;
        for (int64_t row = begin; row < end; ++row) {
            float* const to = y + row * axis[0].size;
            int64_t at = 0, place;
            bool is_inside = true;
            for (int k = 1; k < axes; ++k) {
                is_inside = axis[k].find(border, index[k], &place) && is_inside;
                at += place;
            }
            if (is_inside)
                copy_row(x + at, to);
            else
                for (int64_t i = 0; i < axis[0].size; ++i) to[i] = fill;
            for (int k = 1; k < axes && ++index[k] == axis[k].size; ++k) index[k] = 0;
        }
    }
};

struct Total {
    static constexpr double kNone = 0;
    using Sum = double;
    static Sum of(Sum a, Sum b) { return a + b; }
};

// NaN stays.
struct Largest {
    static constexpr float kNone = -__builtin_inff();
    using Sum = float;
    static Sum of(Sum a, Sum b) { return a >= b || a != a ? a : b; }
};

struct LargestNumber {
    static constexpr float kNone = -FLT_MAX;
    using Sum = float;
    static Sum of(Sum a, Sum b) { return b > a ? b : a; }
};

template <class Kind>
typename Kind::Sum reduced_row(const float* x, int64_t length) {
    constexpr int64_t kLanes = 16;
    typename Kind::Sum lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Kind::kNone;
    int64_t k = 0;
    for (; k + kLanes <= length; k += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] = Kind::of(lanes[lane], x[k + lane]);
    for (; k < length; ++k) lanes[k % kLanes] = Kind::of(lanes[k % kLanes], x[k]);
    for (int64_t some = kLanes / 2; some > 0; some /= 2)
        for (int64_t lane = 0; lane < some; ++lane)
            lanes[lane] = Kind::of(lanes[lane], lanes[lane + some]);
    return lanes[0];
}

// Reduces `width` adjacent columns.
template <class Kind>
void reduce_columns(const float* x, int64_t length, int64_t inner, int64_t width,
                    typename Kind::Sum* sums) {
    for (int64_t j = 0; j < width; ++j) sums[j] = Kind::kNone;
    for (int64_t k = 0; k < length; ++k, x += inner)
        for (int64_t j = 0; j < width; ++j) sums[j] = Kind::of(sums[j], x[j]);
}

// Calls work(first element, columns) for groups of adjacent columns of (rows, length, inner).
template <class Work>
void each_group(const Step& step, int64_t columns, int64_t length, int64_t inner, int64_t cost,
                const Work& work) {
    const int64_t groups = parts_of(inner, kColumns), all = columns / most(inner, 1) * groups;
    const int64_t size = length * least(inner, kColumns), some = most(kChunk / most(size, 1), 1);
    const int threads = useful_threads(step, columns * length, cost);
    parallel_for(threads, parts_of(all, some), [&](int64_t chunk, int) {
        for (int64_t k = chunk * some; k < least(all, (chunk + 1) * some); ++k) {
            const int64_t first = k % groups * kColumns;
            work(k / groups, first, least(inner - first, kColumns));
        }
    });
}

template <class Kind>
int reduce_all(const Step& step) {
    const ece408_reduced& of = step.of.of.reduced;
    const float* const x = input(step, 0);
    float* const y = output(step);
    const auto factor = static_cast<typename Kind::Sum>(Kind::kNone == 0 ? of.factor : 1);
    const auto work = [&](int64_t i, int64_t first, int64_t width) {
        const float* const from = x + i * of.length * of.inner + first;
        float* const to = y + i * of.inner + first;
        typename Kind::Sum sums[kColumns];
        if (of.inner == 1)
            sums[0] = reduced_row<Kind>(from, of.length);
        else
            reduce_columns<Kind>(from, of.length, of.inner, width, sums);
        for (int64_t j = 0; j < width; ++j) to[j] = static_cast<float>(sums[j] * factor);
    };
    each_group(step, of.outputs, of.length, of.inner, 1, work);
    return ECE408_OK;
}

// Softmax of `width` adjacent columns; y may be x.
void softmax_columns(const ece408_softmaxed& of, const float* x, int64_t width, float* y) {
    const auto scale = static_cast<float>(of.scale);
    float largest[kColumns], last[kColumns];
    double sums[kColumns];
    for (int64_t j = 0; j < width; ++j) largest[j] = -__builtin_inff(), sums[j] = 0;
    for (int64_t k = 0; k < of.length; ++k)
        for (int64_t j = 0; j < width; ++j) {
            const float value = x[k * of.inner + j] * scale;
            largest[j] = value > largest[j] ? value : largest[j];
        }
    for (int64_t k = 0; k < of.length; ++k)
        for (int64_t j = 0; j < width; ++j) {
            const int64_t at = k * of.inner + j;
            const float value = x[at] * scale - largest[j], power = exponential(value);
            sums[j] += power;
            y[at] = of.logarithm ? value : power;
        }
    for (int64_t j = 0; j < width; ++j)
        last[j] = static_cast<float>(of.logarithm ? log(sums[j]) : 1 / sums[j]);
    for (int64_t k = 0; k < of.length; ++k)
        for (int64_t j = 0; j < width; ++j) {
            float& value = y[k * of.inner + j];
            value = of.logarithm ? value - last[j] : value * last[j];
        }
}

}  // namespace

int copy_strided(const Step& step) {
    const ece408_strided& of = step.of.of.strided;
    const float* const x = input(step, 0);
    float* const y = output(step);
    if (of.elements < 1) return ECE408_OK;
    const Copy copy(of);
    const int64_t width = copy.axis[0].size, rows = of.elements / width;
    const int64_t some = most(kChunk / width, 1);
    const int threads = useful_threads(step, of.elements, 1);
    parallel_for(threads, parts_of(rows, some), [&](int64_t chunk, int) {
        copy.copy_rows(chunk * some, least(rows, (chunk + 1) * some), x, y);
    });
    return ECE408_OK;
}

int reduce(const Step& step) {
    switch (step.of.of.reduced.kind) {
        case ECE408_REDUCE_SUM: return reduce_all<Total>(step);
        case ECE408_REDUCE_LARGEST: return reduce_all<Largest>(step);
        case ECE408_REDUCE_LARGEST_NUMBER: return reduce_all<LargestNumber>(step);
    }
    return ECE408_INVALID;
}

int softmax(const Step& step) {
    const ece408_softmaxed& of = step.of.of.softmaxed;
    const float* const x = input(step, 0);
    float* const y = output(step);
    constexpr int64_t kCost = 8;
    each_group(step, of.rows, of.length, of.inner, kCost,
               [&](int64_t i, int64_t first, int64_t width) {
                   const int64_t at = i * of.length * of.inner + first;
                   softmax_columns(of, x + at, width, y + at);
               });
    return ECE408_OK;
}

}  // namespace ece408
