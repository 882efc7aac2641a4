// Epilogue of conv_fwd_oc.h: transposes sums and stores them as outputs.
#pragma once

#include "conv/oc_geometry.h"
#include "micro/epilogue.h"
#include "micro/interleave.h"
#include "micro/lanes.h"

namespace ece408 {
namespace {

// Adjacent output pixels: element `at` of the first filter's plane on, with sums from pixel `from`
// on.
struct OutputRun {
    int64_t at, count, from;
};

// Prefetches the output lines of a block step by step while its tiles compute: many stores at once
// would wait for memory.
template <class T>
class OutputPrefetch {
public:
    // `first`: the first filter's output. `step`: elements from pixel to pixel.
    OutputPrefetch(const OutputRun* output, int64_t outputs, const T* first, int64_t plane, int64_t filters,
                   int64_t step, int64_t tiles)
        : output_(output), outputs_(outputs), first_(first), plane_(plane), filters_(filters), step_(step) {
        int64_t lines = 0;
        for (int64_t n = 0; n < outputs; ++n) lines += divide_up(output[n].count * step, kInLine);
        lines_per_tile_ = divide_up(filters * lines, tiles);
    }

    void issue() {
        for (int64_t n = 0; n < lines_per_tile_ && done_ < outputs_; ++n) {
            const OutputRun& output = output_[done_];
            __builtin_prefetch(first_ + output.at + filter_ * plane_ + next_, 1, 3);
            next_ += kInLine;
            if (next_ < output.count * step_) continue;
            next_ = 0;
            if (++filter_ < filters_) continue;
            filter_ = 0;
            ++done_;
        }
    }

private:
    static constexpr int64_t kInLine = 64 / sizeof(T);

    const OutputRun* output_;
    int64_t outputs_;
    const T* first_;
    int64_t plane_, filters_, step_, lines_per_tile_, done_ = 0, filter_ = 0, next_ = 0;
};

// Operations on sums before they are stored.
template <class T>
struct Epilogue {
    const T* bias;           // or null
    bool accumulate;         // add to the output's old contents
    ece408_epilogue affine;  // factors, addends, sum and bounds; none if factors are null
    bool streams = false;    // non-temporal stores of whole lines

    // The same for filters from `m` on and output elements from `at` on.
    Epilogue from(int64_t m, int64_t at) const {
        return {bias ? bias + m : nullptr, accumulate, epilogue_from(affine, m, at), streams};
    }
};

// Clamps a number or a vector; NaN stays NaN.
template <class V>
V between(V value, V lowest, V highest) {
    value = value < lowest ? lowest : value;
    return value > highest ? highest : value;
}

// Applies bias, factor and addend, and bounds if nothing is added, to sums of `filters` filters for
// `count` pixels.
template <class T, class Sum>
void apply_epilogue(const Epilogue<T>& epilogue, int64_t filters, int64_t wide, int64_t count, Sum* rows) {
    using L = Lanes<Sum>;
    const ece408_epilogue& affine = epilogue.affine;
    if (!epilogue.bias && !affine.factors) return;
    Sum factors[kOcVectors * L::count] = {}, addends[kOcVectors * L::count] = {};
    for (int64_t m = 0; m < filters; ++m) {
        factors[m] = affine.factors ? affine.factors[m] : 1;
        const Sum bias = epilogue.bias ? static_cast<Sum>(epilogue.bias[m]) : Sum(0);
        addends[m] = affine.factors ? bias * factors[m] + affine.addends[m] : bias;
    }
    const bool is_bounded = affine.factors && !affine.added;
    const auto lowest = L::broadcast(affine.lowest), highest = L::broadcast(affine.highest);
    for (int64_t m = 0; m < wide; m += L::count) {
        const auto factor = L::load(factors + m), addend = L::load(addends + m);
        for (Sum* at = rows + m; at < rows + count * wide; at += wide) {
            const auto value = L::load(at) * factor + addend;
            L::store(at, is_bounded ? between(value, lowest, highest) : value);
        }
    }
}

// Stores rows[k * wide + m] to out[m * step + k * spread] for `count` pixels, after adding `added`
// and clamping, or accumulates.
template <class T, class Sum>
void transpose_store_strided(const Sum* rows, int64_t wide, int64_t count, const Epilogue<T>& epilogue, T* out,
                             int64_t step, int64_t filters, int64_t spread) {
    const ece408_epilogue& affine = epilogue.affine;
    for (int64_t m = 0; m < filters; ++m) {
        T* to = out + m * step;
        for (int64_t k = 0; k < count; ++k, to += spread) {
            Sum value = rows[k * wide + m];
            if (affine.added)
                value = between<Sum>(value + affine.added[to - out], affine.lowest, affine.highest);
            *to = static_cast<T>(epilogue.accumulate ? static_cast<Sum>(*to + value) : value);
        }
    }
}

template <class T, class Sum>
void transpose_store(const Sum* rows, int64_t wide, int64_t count, const Epilogue<T>& epilogue,
                     T* out, int64_t step, int64_t filters) {
    transpose_store_strided(rows, wide, count, epilogue, out, step, filters, 1);
}

// Transposes multiples of four filters and calls put(filter, first pixel, pixels, vector) for
// vectors of pixels.
template <class Put>
__attribute__((always_inline)) inline void transpose_fours(const float* rows, int64_t wide, int64_t count,
                                                           int64_t filters, const Put& put) {
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t m = 0; m < filters; m += 4) {
        Vec sums[4];
        for (int64_t k = 0; k < whole; k += kLanes) {
            transpose_four(rows + k * wide + m, wide, kLanes, sums);
            for (int64_t i = 0; i < 4; ++i) put(m + i, k, kLanes, sums[i]);
        }
        if (whole == count) continue;
        transpose_four(rows + whole * wide + m, wide, count - whole, sums);
        for (int64_t i = 0; i < 4; ++i) put(m + i, whole, static_cast<int>(count - whole), sums[i]);
    }
}

inline void transpose_store(const float* rows, int64_t wide, int64_t count,
                            const Epilogue<float>& epilogue, float* out, int64_t step,
                            int64_t filters) {
    const int64_t fours = filters / 4 * 4;
    const float* const added = epilogue.affine.added;
    const Vec lowest = broadcast(epilogue.affine.lowest), highest = broadcast(epilogue.affine.highest);
    if (added)
        transpose_fours(rows, wide, count, fours, [=](int64_t m, int64_t k, int pixels, Vec sum) {
            const int64_t at = m * step + k;
            const float* const from = added + at;
            sum += pixels == kLanes ? load(from) : load_only(lanes_between(0, pixels), from);
            put_lanes(0, pixels, out + at, bounded(sum, lowest, highest), false);
        });
#if ECE408_STREAMS
    else if (epilogue.streams)
        transpose_fours(rows, wide, count, fours, [=](int64_t m, int64_t k, int pixels, Vec sum) {
            float* const to = out + m * step + k;
            if (pixels == kLanes && floats_past_line(to) == 0) return stream(to, sum);
            put_lanes(0, pixels, to, sum, false);
        });
#endif
    else
        transpose_fours(rows, wide, count, fours, [=](int64_t m, int64_t k, int pixels, Vec sum) {
            put_lanes(0, pixels, out + m * step + k, sum, epilogue.accumulate);
        });
    const int64_t last = fours * step;  // of the remaining filters
    transpose_store_strided(rows + fours, wide, count, epilogue.from(fours, last), out + last,
                            step, filters - fours, 1);
}

// Stores to every second element, without `added`.
template <class T, class Sum>
void transpose_store_even(const Sum* rows, int64_t wide, int64_t count,
                          const Epilogue<T>& epilogue, T* out, int64_t step, int64_t filters) {
    transpose_store_strided(rows, wide, count, epilogue, out, step, filters, 2);
}

#if ECE408_LANES == 16
inline void transpose_store_even(const float* rows, int64_t wide, int64_t count, const Epilogue<float>& epilogue,
                                 float* out, int64_t step, int64_t filters) {
    constexpr Mask kEven = 0x5555;
    const int64_t fours = filters / 4 * 4;
    const auto put_half = [&](Mask lanes, Vec sum, float* to) {
        store_only(lanes, to, epilogue.accumulate ? sum + load_only(lanes, to) : sum);
    };
    transpose_fours(rows, wide, count, fours, [&](int64_t m, int64_t k, int pixels, Vec sum) {
        float* const to = out + m * step + 2 * k;
        const int first = pixels < kLanes / 2 ? pixels : kLanes / 2;
        put_half(kEven & lanes_below(2 * first), interleave_first(sum, sum), to);
        if (pixels > first)
            put_half(kEven & lanes_below(2 * (pixels - first)), interleave_second(sum, sum), to + kLanes);
    });
    const int64_t last = fours * step;
    transpose_store_strided(rows + fours, wide, count, epilogue, out + last, step, filters - fours, 2);
}
#endif

}  // namespace
}  // namespace ece408
