// Max and average pooling, and their gradients. Compiled once per instruction set, like direct.cpp.
//
// The rows of a window are reduced to one row with borders, and that row to vectors of windows. A
// few rows of windows are processed together, so that numbers are not read right after they were
// written: loads that cross the stores' vectors would stall. Averages of whole planes are plain
// sums.
#include "layers/pool.h"

#include <string.h>

#include "api/shape.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/dot_tile.h"
#include "micro/half.h"
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

// The windows whose element n is on the plane.
int64_t first_with(const Windows& w, int64_t n) {
    return n < w.pad ? (w.pad - n + w.stride - 1) / w.stride : 0;
}
int64_t last_with(const Windows& w, int64_t n) {
    const int64_t last = (w.size + w.pad - n + w.stride - 1) / w.stride;
    return last < 0 ? 0 : last < w.count ? last : w.count;
}

// The end of the last window, or of the border.
int64_t reach_of(const Windows& w) {
    const int64_t windows = (w.count - 1) * w.stride + w.kernel, border = w.size + 2 * w.pad;
    return windows < border ? border : windows;
}

// One element of each of `count` windows, at x, `STRIDE` apart. If it equals the window's largest,
// y, it takes the window's gradient, which moves from `left` to dx, whose elements are `TO` apart.
template <int64_t STRIDE, int64_t TO>
void give_largest(const float* __restrict x, const float* __restrict y, int64_t stride,
                  int64_t count, float* __restrict left, float* __restrict dx) {
    const int64_t from = STRIDE ? STRIDE : stride, to = TO ? TO : stride;
    for (int64_t j = 0; j < count; ++j) {
        const uint32_t takes = x[j * from] == y[j] ? ~uint32_t{0} : 0;
        const uint32_t gradient = bits_of_float(left[j]);
        dx[j * to] += float_of_bits(gradient & takes);
        left[j] = float_of_bits(gradient & ~takes);
    }
}

// Adds rows of even and of odd elements to dx, from element `first` of both on.
void add_by_twos(const float* __restrict even, const float* __restrict odd, int64_t first,
                 int64_t count, float* __restrict dx) {
    if (first % 2) {
        *dx++ += odd[first / 2];
        ++first, --count;
    }
    even += first / 2, odd += first / 2;
    const int64_t pairs = count / 2;
    for (int64_t j = 0; j < pairs; ++j) {
        dx[2 * j] += even[j];
        dx[2 * j + 1] += odd[j];
    }
    if (count % 2) dx[count - 1] += even[pairs];
}

// Distributes the windows' gradients, the first `count` floats of the buffer, to one row of
// elements: first to the first element of every window, then to the second one, and so on. With
// stride 2, even and odd elements are in separate rows, so that the compiler vectorises.
void give_terms(const Windows& columns, const float* x, const float* y, float* buffer, float* dx) {
    const int64_t stride = columns.stride, half = (reach_of(columns) + 1) / 2;
    const auto give = stride == 1   ? give_largest<1, 1>
                      : stride == 2 ? give_largest<2, 1>
                                    : give_largest<0, 0>;
    float* const halves = buffer + columns.count;
    if (stride == 2) memset(halves, 0, static_cast<size_t>(2 * half) * sizeof(float));
    for (int64_t n = 0; n < columns.kernel; ++n) {
        const int64_t begin = first_with(columns, n), end = last_with(columns, n);
        const int64_t at = begin * stride + n - columns.pad;
        float* const to = stride == 2 ? halves + n % 2 * half + n / 2 + begin : dx + at;
        if (begin < end) give(x + at, y + begin, stride, end - begin, buffer + begin, to);
    }
    if (stride == 2) add_by_twos(halves, halves + half, columns.pad, columns.size, dx);
}

// Row i of windows adds its gradient to the plane dx; y and dy are rows.
void give_to_largest(const Windows& rows, const Windows& columns, int64_t i, const float* x,
                     const float* y, const float* dy, float* buffer, float* dx) {
    const int64_t width = columns.size, first = begin_of(rows, i);
    memcpy(buffer, dy, static_cast<size_t>(columns.count) * sizeof(float));
    for (int64_t r = first; r < end_of(rows, i); ++r)
        give_terms(columns, x + r * width, y, buffer, dx + r * width);
    // If no element equals y, because all are NaN or -inf, the first one takes it, if there is one.
    if (first >= end_of(rows, i)) return;
    for (int64_t j = 0; j < columns.count; ++j)
        if (buffer[j] != 0 && begin_of(columns, j) < end_of(columns, j))
            dx[first * width + begin_of(columns, j)] += buffer[j];
}

void give_average(const Windows& rows, const Windows& columns, int64_t i, float height,
                  const float* widths, const float* dy, float* buffer, float* dx) {
    memset(buffer, 0, static_cast<size_t>(reach_of(columns)) * sizeof(float));
    for (int64_t j = 0; j < columns.count; ++j) {
        const float share = dy[j] / (height * widths[j]);
        for (int64_t n = 0; n < columns.kernel; ++n) buffer[j * columns.stride + n] += share;
    }
    for (int64_t r = begin_of(rows, i); r < end_of(rows, i); ++r)
        for (int64_t c = 0; c < columns.size; ++c)
            dx[r * columns.size + c] += buffer[columns.pad + c];
}

bool backward(const Windows& rows, const Windows& columns, const float* heights,
              const float* widths, int64_t planes, const float* x, const float* y, const float* dy,
              float* dx, int threads) {
    // Room for three rows with their borders.
    const int64_t floats = 3 * reach_of(columns) + 2, pixels = rows.size * columns.size;
    const Buffer<float> memory(threads * floats);
    if (!memory) return false;
    parallel_for(threads, planes, [&](int64_t plane, int thread) {
        float *const buffer = memory + thread * floats, *const to = dx + plane * pixels;
        memset(to, 0, static_cast<size_t>(pixels) * sizeof(float));
        for (int64_t i = 0; i < rows.count; ++i) {
            const int64_t at = (plane * rows.count + i) * columns.count;
            if (heights)
                give_average(rows, columns, i, heights[i], widths, dy + at, buffer, to);
            else
                give_to_largest(rows, columns, i, x + plane * pixels, y + at, dy + at, buffer, to);
        }
    });
    return true;
}

}  // namespace

extern const Pools ECE408_THIS_BUILD(pool) = {forward, backward};

}  // namespace ece408
