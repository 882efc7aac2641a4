// Interleaves rows, of filters or channels.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "micro/vector.h"

namespace ece408 {
namespace {

// Rows from which on whole vectors are transposed, the last one with idle lanes.
constexpr int64_t kWorthLanes = kMasksSuppress ? kLanes / 2 + 1 : kLanes;

// out[k * wide + m] = rows[m * step + k] for k < count, zeros where m >= filters.
template <class T, class Sum>
void interleave(const T* rows, int64_t step, int64_t filters, int64_t wide, int64_t count,
                Sum* out) {
    for (int64_t m = 0; m < wide; ++m)
        for (int64_t k = 0; k < count; ++k)
            out[k * wide + m] = m < filters ? rows[m * step + k] : Sum(0);
}

// Transposes four elements of each of `count` rows, `step` apart, to four vectors with one lane per
// row. Lanes from `count` on repeat the last row.
__attribute__((always_inline)) inline void transpose_four(const float* rows, int64_t step, int64_t count,
                                                          Vec (&out)[4]) {
    Vec in[4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
        const float* row[kLanes / 4];
#pragma GCC unroll 4
        for (int64_t q = 0; q < kLanes / 4; ++q) {
            const int64_t lane = 4 * q + i;
            row[q] = rows + (lane < count ? lane : count - 1) * step;
        }
        in[i] = load_quarters(row);
    }
    const Vec first[2] = {unpack_low(in[0], in[2]), unpack_low(in[1], in[3])};
    const Vec last[2] = {unpack_high(in[0], in[2]), unpack_high(in[1], in[3])};
    out[0] = unpack_low(first[0], first[1]), out[1] = unpack_high(first[0], first[1]);
    out[2] = unpack_low(last[0], last[1]), out[3] = unpack_high(last[0], last[1]);
}

// Interleaves `count` elements, at least four, of each of at most kLanes rows.
__attribute__((always_inline)) inline void interleave_lanes(const float* rows, int64_t step, int some,
                                                            int64_t wide, int64_t count, float* out) {
    for (int64_t next = 0; next < count; next += 4) {
        const int64_t k = next + 4 <= count ? next : count - 4;  // the last four may overlap
        Vec lanes[4];
        transpose_four(rows + k, step, some, lanes);
        for (int64_t i = 0; i < 4; ++i) put_lanes(0, some, out + (k + i) * wide, lanes[i], false);
    }
}

#if defined(__SSE2__)
inline void interleave(const float* rows, int64_t step, int64_t filters, int64_t wide,
                       int64_t count, float* out) {
    if (count == 1 && step == 1) {  // weights of a 1x1 kernel, for the gradient for x
        memcpy(out, rows, static_cast<size_t>(filters) * sizeof(float));
        memset(out + filters, 0, static_cast<size_t>(wide - filters) * sizeof(float));
        return;
    }
    int64_t done = 0;
    for (int64_t left; count >= 4 && (left = filters - done) >= kWorthLanes;) {
        const float* const from = rows + done * step;
        const int some = static_cast<int>(left < kLanes ? left : kLanes);
        if (some == kLanes)
            interleave_lanes(from, step, kLanes, wide, count, out + done);
        else
            interleave_lanes(from, step, some, wide, count, out + done);
        done += some;
    }
    // Remaining rows: four at a time, then two, then one; of each, four elements at a time.
    const int64_t fours = done + (filters - done) / 4 * 4, pairs = done + (filters - done) / 2 * 2;
    const int64_t square = count / 4 * 4;
    for (int64_t k = 0; k < square; k += 4) {
        const float* from = rows + done * step + k;
        float* to = out + k * wide + done;
        for (int64_t m = done; m < fours; m += 4, from += 4 * step, to += 4) {
            __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + step);
            __m128 c = _mm_loadu_ps(from + 2 * step), d = _mm_loadu_ps(from + 3 * step);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(to, a);
            _mm_storeu_ps(to + wide, b);
            _mm_storeu_ps(to + 2 * wide, c);
            _mm_storeu_ps(to + 3 * wide, d);
        }
        if (fours < pairs) {
            const __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + step);
            const __m128 first = _mm_unpacklo_ps(a, b), second = _mm_unpackhi_ps(a, b);
            _mm_storel_pi(reinterpret_cast<__m64*>(to), first);
            _mm_storeh_pi(reinterpret_cast<__m64*>(to + wide), first);
            _mm_storel_pi(reinterpret_cast<__m64*>(to + 2 * wide), second);
            _mm_storeh_pi(reinterpret_cast<__m64*>(to + 3 * wide), second);
            from += 2 * step, to += 2;
        }
        for (int64_t m = pairs; m < wide; ++m, from += step, ++to)
            for (int64_t i = 0; i < 4; ++i) to[i * wide] = m < filters ? from[i] : 0.0f;
    }
    for (int64_t k = square; k < count; ++k)
        for (int64_t m = done; m < wide; ++m)
            out[k * wide + m] = m < filters ? rows[m * step + k] : 0.0f;
}
#endif

}  // namespace
}  // namespace ece408
