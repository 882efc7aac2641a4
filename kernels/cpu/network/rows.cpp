// Reductions and softmax of rows. Compiled once per instruction set.
//
// Rows whose elements are adjacent are reduced to some lanes, others side by side. Sums are in
// double.
#include <float.h>
#include <math.h>

#include "host/thread_pool.h"
#include "network/exponential.h"
#include "network/steps.h"

namespace ece408 {
namespace {

// Elements that a chunk has at least, columns that are reduced side by side, and elements of a part
// of a row.
constexpr int64_t kChunk = 1 << 12, kColumns = 64, kPart = 1 << 9;
constexpr float kInfinity = __builtin_inff();

struct Total {
    static constexpr double kNone = 0;
    using Sum = double;
    static Sum of(Sum a, Sum b) { return a + b; }
};

// NaN stays.
struct Largest {
    static constexpr float kNone = -kInfinity;
    using Sum = float;
    static Sum of(Sum a, Sum b) { return (a >= b) | (a != a) ? a : b; }
};

template <bool INFINITE>
struct LargestNumber {
    static constexpr float kNone = INFINITE ? -kInfinity : -FLT_MAX;
    using Sum = float;
    static Sum of(Sum a, Sum b) { return b > a ? b : a; }
};

// Reduces adjacent elements.
template <class Kind>
typename Kind::Sum reduced_row(const float* x, int64_t length) {
    constexpr int64_t kLanes = 16, kFew = 4;
    typename Kind::Sum lanes[kLanes], rest = Kind::kNone;
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Kind::kNone;
    int64_t k = 0;
    for (; k + kLanes <= length; k += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] = Kind::of(lanes[lane], x[k + lane]);
    for (; k + kFew <= length; k += kFew)
        for (int64_t lane = 0; lane < kFew; ++lane)
            lanes[lane] = Kind::of(lanes[lane], x[k + lane]);
    for (; k < length; ++k) rest = Kind::of(rest, x[k]);
    for (int64_t some = kLanes / 2; some > 0; some /= 2)
        for (int64_t lane = 0; lane < some; ++lane)
            lanes[lane] = Kind::of(lanes[lane], lanes[lane + some]);
    return Kind::of(lanes[0], rest);
}

// Reduces `width` adjacent columns.
template <class Kind>
void add_columns(const float* x, int64_t length, int64_t inner, int64_t width,
                 typename Kind::Sum* sums) {
    for (int64_t j = 0; j < width; ++j) sums[j] = Kind::kNone;
    for (int64_t k = 0; k < length; ++k, x += inner)
        for (int64_t j = 0; j < width; ++j) sums[j] = Kind::of(sums[j], x[j]);
}

// Computes `width` adjacent columns from x to y.
using Columns = void(const ece408_step& step, const float* x, int64_t width, float* y);

// Computes all columns of x, arrays of (length, inner), by groups of adjacent ones; y has arrays of
// (out_length, inner).
int each_group(const Step& step, int64_t columns, int64_t length, int64_t inner, int64_t out_length,
               int64_t cost, Columns* compute) {
    const float* const x = input(step, 0);
    float* const y = output(step);
    const int64_t groups = parts_of(inner, kColumns), all = columns / most(inner, 1) * groups;
    const int64_t size = length * least(inner, kColumns), some = most(kChunk / most(size, 1), 1);
    const int threads = useful_threads(step, columns * length, cost);
    parallel_for(threads, parts_of(all, some), [&](int64_t chunk, int) {
        for (int64_t k = chunk * some; k < least(all, (chunk + 1) * some); ++k) {
            const int64_t i = k / groups * inner, first = k % groups * kColumns;
            compute(step.of, x + i * length + first, least(inner - first, kColumns),
                    y + i * out_length + first);
        }
    });
    return ECE408_OK;
}

template <class Kind>
void reduce_columns(const ece408_step& step, const float* x, int64_t width, float* y) {
    const ece408_reduced& of = step.of.reduced;
    typename Kind::Sum sums[kColumns];
    if (of.inner == 1)
        sums[0] = reduced_row<Kind>(x, of.length);
    else
        add_columns<Kind>(x, of.length, of.inner, width, sums);
    const bool is_sum = of.kind == ECE408_REDUCE_SUM;
    for (int64_t j = 0; j < width; ++j)
        y[j] = static_cast<float>(is_sum ? sums[j] * of.factor : sums[j]);
}

// The power of e to `value`, which is at most 0, in y; or value itself.
template <bool LOGARITHM>
float put_power(float value, float* y) {
    const float power = exponential(value);
    *y = LOGARITHM ? value : power;
    return power;
}

// Softmax of `length` adjacent elements; y may be x.
template <bool LOGARITHM>
void softmax_row(const float* x, int64_t length, float scale, float* y) {
    float kept[kPart], largest = -kInfinity;
    double sum = 0;
    for (int64_t first = 0, some; first < length; first += some) {
        some = least(length - first, kPart);
        for (int64_t k = 0; k < some; ++k) kept[k] = x[first + k] * scale;
        const float found = reduced_row<LargestNumber<true>>(kept, some);
        largest = found > largest ? found : largest;
    }
    for (int64_t first = 0, some; first < length; first += some) {
        some = least(length - first, kPart);
        for (int64_t k = 0; k < some; ++k)
            kept[k] = put_power<LOGARITHM>(x[first + k] * scale - largest, y + first + k);
        sum += reduced_row<Total>(kept, some);
    }
    const auto last = static_cast<float>(LOGARITHM ? log(sum) : 1 / sum);
    for (int64_t k = 0; k < length; ++k) y[k] = LOGARITHM ? y[k] - last : y[k] * last;
}

// Softmax of `width` adjacent columns; y may be x.
template <bool LOGARITHM>
void softmax_columns(const ece408_step& step, const float* x, int64_t width, float* y) {
    const ece408_softmaxed& of = step.of.softmaxed;
    const auto scale = static_cast<float>(of.scale);
    if (of.inner == 1) return softmax_row<LOGARITHM>(x, of.length, scale, y);
    float largest[kColumns], last[kColumns];
    double sums[kColumns];
    for (int64_t j = 0; j < width; ++j) largest[j] = -kInfinity, sums[j] = 0;
    for (int64_t k = 0; k < of.length; ++k)
        for (int64_t j = 0; j < width; ++j) {
            const float value = x[k * of.inner + j] * scale;
            largest[j] = value > largest[j] ? value : largest[j];
        }
    for (int64_t k = 0; k < of.length; ++k)
        for (int64_t j = 0; j < width; ++j) {
            const int64_t at = k * of.inner + j;
            sums[j] += put_power<LOGARITHM>(x[at] * scale - largest[j], y + at);
        }
    for (int64_t j = 0; j < width; ++j)
        last[j] = static_cast<float>(LOGARITHM ? log(sums[j]) : 1 / sums[j]);
    for (int64_t k = 0; k < of.length; ++k)
        for (int64_t j = 0; j < width; ++j) {
            float& value = y[k * of.inner + j];
            value = LOGARITHM ? value - last[j] : value * last[j];
        }
}

int reduce(const Step& step) {
    // By enum ece408_reduce_kind.
    constexpr Columns* kKinds[] = {reduce_columns<Total>, reduce_columns<Largest>,
                                   reduce_columns<LargestNumber<false>>};
    const ece408_reduced& of = step.of.of.reduced;
    if (of.kind < 0 || of.kind > ECE408_REDUCE_LARGEST_NUMBER) return ECE408_INVALID;
    return each_group(step, of.outputs, of.length, of.inner, 1, 1, kKinds[of.kind]);
}

int softmax(const Step& step) {
    constexpr int64_t kCost = 4;
    const ece408_softmaxed& of = step.of.of.softmaxed;
    return each_group(step, of.rows, of.length, of.inner, of.length, kCost,
                      of.logarithm ? softmax_columns<true> : softmax_columns<false>);
}

int one_hot(const Step& step) {
    const ece408_softmaxed& of = step.of.of.softmaxed;
    const float* const labels = input(step, 0);
    float* const y = output(step);
    const int threads = useful_threads(step, of.rows * of.length * of.inner, 1);
    parallel_for(threads, of.rows * of.length, [&](int64_t row, int) {
        const float* const of_row = labels + row / of.length * of.inner;
        const auto number = static_cast<float>(row % of.length);
        float* const to = y + row * of.inner;
        for (int64_t j = 0; j < of.inner; ++j) to[j] = of_row[j] == number ? 1 : 0;
    });
    return ECE408_OK;
}

}  // namespace

extern const Rows ECE408_THIS_BUILD(rows) = {reduce, softmax, one_hot};

}  // namespace ece408
