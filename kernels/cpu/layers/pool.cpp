// Max and average pooling. Compiled once per instruction set, like direct.cpp.
//
// The rows of a window are reduced to one row with borders, and that row to vectors of windows. A
// few rows of windows are processed together, so that numbers are not read right after they were
// written: loads that cross the stores' vectors would stall. Averages of whole planes are plain
// sums.
#include "layers/pool.h"

#include "api/shape.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/dot_tile.h"
#include "micro/lanes.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

using Windows = ece408_windows;

struct Largest {
    static constexpr float kNone = -__FLT_MAX__;
    static Vec of(Vec a, Vec b) { return larger(a, b); }
    static float of(float a, float b) { return a < b ? b : a; }
};

struct Total {
    static constexpr float kNone = 0;
    static Vec of(Vec a, Vec b) { return a + b; }
    static float of(float a, float b) { return a + b; }
};

// Reduced rows at a time, and the elements of all of them, unless a single row has more.
constexpr int64_t kRows = 8, kNumbers = 1 << 13;

// The part of window i on the plane, along one axis: its beginning and its end.
int64_t begin_of(const Windows& w, int64_t i) {
    const int64_t first = i * w.stride - w.pad;
    return first < 0 ? 0 : first;
}
int64_t end_of(const Windows& w, int64_t i) {
    const int64_t end = i * w.stride - w.pad + w.kernel;
    return end < w.size ? end : w.size;
}

// Reduces the terms from `first` on. A value that is not NaN stays so if terms are NaN: as in
// MXNet's own pooling in plain layout, the maximum of only NaN, or -inf, is the neutral element.
template <class Reduction, class Load>
Vec reduced(Vec value, int64_t first, int64_t terms, const Load& load_term) {
    for (int64_t n = first; n < terms; ++n) value = Reduction::of(value, load_term(n));
    return value;
}

// Reduces `count` rows of `width` elements to `out`, followed by a vector of neutral elements.
// Prefetches elements `ahead` of them.
template <class Reduction>
void reduce_rows(const float* x, int64_t width, int64_t count, int64_t ahead, float* out) {
    const Vec none = broadcast(Reduction::kNone);
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) {
        const auto term = [&](int64_t r) {
            const float* const from = x + r * width + k;
            __builtin_prefetch(from + ahead, 0, 3);
            return load(from);
        };
        store(out + k, reduced<Reduction>(none, 0, count, term));
    }
    if (k < width) {
        const Mask mask = lanes_between(0, static_cast<int>(width - k));
        const auto term = [&](int64_t r) { return load_only(mask, x + r * width + k); };
        store(out + k, reduced<Reduction>(none, 0, count, term));
    }
    store(out + width, none);
}

// A vector of windows of KERNEL columns (0: any number); the first one begins at `at`.
template <class Reduction, int STRIDE, int KERNEL>
Vec reduce_columns(const float* at, int64_t kernel) {
    const auto term = [&](int64_t n) {
        if constexpr (STRIDE == 1) return load(at + n);
        const Vec first = load(at + n / 2 * 2), second = load(at + n / 2 * 2 + kLanes);
        return n % 2 ? odd_lanes(first, second) : even_lanes(first, second);
    };
    return reduced<Reduction>(term(0), 1, KERNEL ? KERNEL : kernel, term);
}

template <class Reduction, int STRIDE, int KERNEL>
void reduce_row(const Windows& columns, const float* row, const float* widths, float height, float* y) {
    const auto whole = [&](int64_t j) {
        const Vec value = reduce_columns<Reduction, STRIDE, KERNEL>(row + j * STRIDE, columns.kernel);
        return widths ? value / (broadcast(height) * load(widths + j)) : value;
    };
    const int64_t count = columns.count;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store(y + j, whole(j));
    if (j < count) put_lanes(0, static_cast<int>(count - j), y + j, whole(j), false);
}

// Other strides: one window at a time.
template <class Reduction>
void reduce_row_apart(const Windows& columns, const float* row, const float* widths, float height,
                      float* y) {
    for (int64_t j = 0; j < columns.count; ++j, row += columns.stride) {
        float value = row[0];
        for (int64_t n = 1; n < columns.kernel; ++n) value = Reduction::of(value, row[n]);
        y[j] = widths ? value / (height * widths[j]) : value;
    }
}

using RowFunction = void(const Windows&, const float*, const float*, float, float*);

template <class Reduction>
RowFunction* pick_row(const Windows& columns) {
    if (columns.stride == 1)
        return columns.kernel == 3 ? reduce_row<Reduction, 1, 3> : reduce_row<Reduction, 1, 0>;
    if (columns.stride == 2)
        return columns.kernel == 3 ? reduce_row<Reduction, 2, 3> : reduce_row<Reduction, 2, 0>;
    return reduce_row_apart<Reduction>;
}

template <class Reduction>
bool pool(const Windows& rows, const Windows& columns, const float* heights, const float* widths,
          int64_t planes, const float* x, float* y, int threads) {
    // A row holds its columns, its last vector of windows, and one vector more that is written or
    // read.
    const int64_t read = round_up(columns.count, kLanes) * columns.stride + columns.kernel;
    const int64_t written = columns.pad + round_up(columns.size, kLanes);
    const int64_t row = (read > written ? read : written) + 2 * kLanes;
    const int64_t fit = kNumbers / row < 1 ? 1 : kNumbers / row, most = fit < kRows ? fit : kRows;
    // Widths for a whole last vector.
    const Buffer<float> memory(threads * most * row), all_widths(columns.count + kLanes);
    if (!memory || !all_widths) return false;
    for (int64_t j = 0; j < columns.count + kLanes; ++j)
        all_widths[j] = widths && j < columns.count ? widths[j] : 1;
    const float* const own_widths = widths ? static_cast<const float*>(all_widths) : nullptr;
    const int64_t ahead = most * rows.stride * columns.size;  // the input of the next rows of windows
    RowFunction* const reduce_one = pick_row<Reduction>(columns);
    parallel_for_ranges(threads, planes, [&](int64_t begin, int64_t end, int thread) {
        float* const kept = memory + thread * most * row;
        for (int64_t k = 0; k < most * row; ++k) kept[k] = Reduction::kNone;
        for (int64_t plane = begin; plane < end; ++plane) {
            const float* const from = x + plane * rows.size * columns.size;
            float* const to = y + plane * rows.count * columns.count;
            for (int64_t first = 0, some; first < rows.count; first += some) {
                some = rows.count - first < most ? rows.count - first : most;
                for (int64_t i = first; i < first + some; ++i)
                    reduce_rows<Reduction>(from + begin_of(rows, i) * columns.size, columns.size,
                                           end_of(rows, i) - begin_of(rows, i), ahead,
                                           kept + (i - first) * row + columns.pad);
                for (int64_t i = first; i < first + some; ++i)
                    reduce_one(columns, kept + (i - first) * row, own_widths,
                               heights ? heights[i] : 0, to + i * columns.count);
            }
        }
    });
    return true;
}

bool has_one_window(const Windows& w) {
    return w.count == 1 && begin_of(w, 0) == 0 && end_of(w, 0) == w.size;
}

// A vector whose lanes add up to the sum of a plane.
Vec sum_plane(const float* x, int64_t pixels) {
    Vec sums[2] = {};
    int64_t k = 0;
    for (; k + 2 * kLanes <= pixels; k += 2 * kLanes) {
        sums[0] = sums[0] + load(x + k);
        sums[1] = sums[1] + load(x + k + kLanes);
    }
    for (; k < pixels; k += kLanes) {
        const int64_t left = pixels - k < kLanes ? pixels - k : kLanes;
        sums[1] = sums[1] + load_only(lanes_between(0, static_cast<int>(left)), x + k);
    }
    return sums[0] + sums[1];
}

// Planes with one window each: sums divided by `divisor`, kLanes planes at a time.
void average_planes(int64_t planes, int64_t pixels, float divisor, const float* x, float* y,
                    int threads) {
    parallel_for(threads, divide_up(planes, kLanes), [&](int64_t some, int) {
        const int64_t first = some * kLanes, left = planes - first;
        const int count = static_cast<int>(left < kLanes ? left : kLanes);
        Lanes<float>::Vec sums[kLanes] = {};
        for (int i = 0; i < count; ++i)
            sums[i] = static_cast<Lanes<float>::Vec>(sum_plane(x + (first + i) * pixels, pixels));
        const Vec each = static_cast<Vec>(sum_each<float, kLanes / 2>(sums));
        put_lanes(0, count, y + first, each / broadcast(divisor), false);
    });
}

bool forward(const Windows& rows, const Windows& columns, const float* heights, const float* widths,
             int64_t planes, const float* x, float* y, int threads) {
    if (widths && has_one_window(rows) && has_one_window(columns)) {
        average_planes(planes, rows.size * columns.size, heights[0] * widths[0], x, y, threads);
        return true;
    }
    const auto run = widths ? pool<Total> : pool<Largest>;
    return run(rows, columns, heights, widths, planes, x, y, threads);
}

}  // namespace

extern const Pools ECE408_THIS_BUILD(pool) = {forward};

}  // namespace ece408
