// Rows of numbers, a filter's or a channel's each, put side by side.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "half.h"

namespace ece408 {
namespace {

// out[k * wide + m] = rows[m * step + k] for k < count, zeros where m >= filters.
template <class T, class Sum>
void interleave(const T* rows, int64_t step, int64_t filters, int64_t wide, int64_t count,
                Sum* out) {
    for (int64_t m = 0; m < wide; ++m)
        for (int64_t k = 0; k < count; ++k)
            out[k * wide + m] = m < filters ? widen(rows[m * step + k]) : Sum(0);
}

#if defined(__SSE2__)
inline void interleave(const float* rows, int64_t step, int64_t filters, int64_t wide,
                       int64_t count, float* out) {
    if (count == 1 && step == 1) {  // a single tap's weights, for the gradient for x
        memcpy(out, rows, static_cast<size_t>(filters) * sizeof(float));
        memset(out + filters, 0, static_cast<size_t>(wide - filters) * sizeof(float));
        return;
    }
    // Four rows at a time, then two, then one; of each four numbers at a time.
    const int64_t fours = filters / 4 * 4, pairs = filters / 2 * 2, square = count / 4 * 4;
    for (int64_t k = 0; k < square; k += 4) {
        const float* from = rows + k;
        float* to = out + k * wide;
        for (int64_t m = 0; m < fours; m += 4, from += 4 * step, to += 4) {
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
        for (int64_t m = 0; m < wide; ++m)
            out[k * wide + m] = m < filters ? rows[m * step + k] : 0.0f;
}
#endif

}  // namespace
}  // namespace ece408
