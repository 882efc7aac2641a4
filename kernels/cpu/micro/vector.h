// One vector of ECE408_LANES floats: the operations of register tiles, and tile sizes that fit the
// instruction set's registers.
//
// Everything is in an anonymous namespace: this file is compiled once per instruction set, and the
// linker must not merge the copies.
#pragma once

#include <stdint.h>
#include <string.h>

#if ECE408_LANES > 4
#include <immintrin.h>
#endif

#if defined(__clang__)
#define ECE408_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ECE408_UNROLL _Pragma("GCC unroll 32")
#endif

namespace ece408 {
namespace {

constexpr int kLanes = ECE408_LANES;
constexpr int64_t kLine = 16;  // floats of a cache line

// Hides a number or an address from the compiler's optimisations.
template <class T>
__attribute__((always_inline)) inline T hidden(T value) {
    asm("" : "+r"(value));
    return value;
}

// Into the second-level cache: the first holds the weights and current pixels.
inline void prefetch(const float* line) { __builtin_prefetch(line, 0, 2); }
// Into the first-level cache, for data that is read next.
inline void prefetch_first_level(const float* line) { __builtin_prefetch(line, 0, 3); }
// For a line that will be written: takes it from other cores.
inline void prefetch_output(const float* line) { __builtin_prefetch(line, 1, 3); }

#if ECE408_LANES == 16

#define ECE408_STREAMS 1
// A masked load does not touch masked-out memory.
constexpr bool kMasksSuppress = true;
// A masked product costs no more than a full one.
constexpr bool kMasksProducts = true;

// 32 registers: at most 24 sums, 4 inputs, 1 weight.
constexpr int kMaxFilters = 12;
constexpr int most_vectors(int filters) { return filters > 8 ? 2 : filters > 6 ? 3 : 4; }

using Vec = __m512;
using Mask = __mmask16;

inline Mask lanes_from(int first) { return static_cast<Mask>(0xffffu << first); }
inline Mask lanes_below(int count) { return static_cast<Mask>((1u << count) - 1); }
inline Mask lanes_between(int begin, int end) { return lanes_from(begin) & lanes_below(end); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load_over(Vec under, Mask mask, const float* p) {
    return _mm512_mask_loadu_ps(under, mask, p);
}
inline Vec load_only(Mask mask, const float* p) { return _mm512_maskz_loadu_ps(mask, p); }
inline Vec broadcast(float value) { return _mm512_set1_ps(value); }
inline Vec multiply_add(Vec a, Vec b, Vec sum) { return _mm512_fmadd_ps(a, b, sum); }
// One instruction with a broadcast memory operand; compilers emit a separate load. Two threads on
// one core compete for instruction slots: there a loop with half of its products like this took
// 0.86 to 0.96 of the time. With all of them it would wait for loads.
inline Vec multiply_add_one(Vec a, const float* b, Vec sum) {
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));
    return sum;
}
inline Vec multiply_add_only(Mask mask, Vec a, Vec b, Vec sum) {
    return _mm512_mask3_fmadd_ps(a, b, sum, mask);
}
// NaN stays NaN. Masked forms with all lanes, because GCC warns of undefined lanes in the plain
// ones.
inline Vec bounded(Vec v, Vec lowest, Vec highest) {
    v = _mm512_mask_max_ps(v, 0xffff, lowest, v);
    return _mm512_mask_min_ps(v, 0xffff, highest, v);
}
// b where it is larger than a, else a, also beside NaN.
inline Vec larger(Vec a, Vec b) { return _mm512_mask_max_ps(a, 0xffff, b, a); }
inline Vec even_lanes(Vec first, Vec second) {
    const __m512i lane =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(first, lane, second);
}
inline Vec odd_lanes(Vec first, Vec second) {
    const __m512i lane =
        _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(first, lane, second);
}
// Lanes shifted up by one; `first` becomes lane 0.
inline Vec moved_up(Vec v, float first) {
    const __m512i lane =
        _mm512_setr_epi32(16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
    return _mm512_permutex2var_ps(v, lane, _mm512_set1_ps(first));
}
// Interleaves two vectors, even lanes from the first: the first half of the result,
inline Vec interleave_first(Vec even, Vec odd) {
    const __m512i lane =
        _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(even, lane, odd);
}
// and the second half.
inline Vec interleave_second(Vec even, Vec odd) {
    const __m512i lane =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(even, lane, odd);
}
// Interleaves the first two lanes of each quarter, and the last two.
inline Vec unpack_low(Vec even, Vec odd) {
    return _mm512_maskz_unpacklo_ps(0xffff, even, odd);
}
inline Vec unpack_high(Vec even, Vec odd) {
    return _mm512_maskz_unpackhi_ps(0xffff, even, odd);
}
// Four floats from each address.
inline Vec load_quarters(const float* const (&p)[4]) {
    Vec v = _mm512_castps128_ps512(_mm_loadu_ps(p[0]));
    v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(p[1]));
    v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(p[2]));
    return _mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(p[3]));
}
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store_only(Mask mask, float* p, Vec v) { _mm512_mask_storeu_ps(p, mask, v); }
inline void put_lanes(int begin, int end, float* p, Vec v, bool add) {
    const Mask mask = lanes_between(begin, end);
    store_only(mask, p, add ? _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, p)) : v);
}

// Non-temporal store to a multiple of 64 bytes.
inline void stream(float* p, Vec v) { _mm512_stream_ps(p, v); }
inline int floats_past_line(const float* p) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(float) % kLanes);
}
// `across` returns the vector that begins `shift` lanes before `second`.
using Lines = __m512i;
inline Lines lines_after(int shift) {
    const __m512i lane =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(lane, _mm512_set1_epi32(kLanes - shift));
}
inline Vec across(Vec first, Lines lines, Vec second) {
    return _mm512_permutex2var_ps(first, lines, second);
}
inline void stream_fence() { _mm_sfence(); }

#elif ECE408_LANES == 8

#define ECE408_STREAMS 0
constexpr bool kMasksSuppress = false;
constexpr bool kMasksProducts = false;

// 16 registers: 12 sums, 2 inputs, 1 weight, 1 mask.
constexpr int kMaxFilters = 6;
constexpr int most_vectors(int) { return 2; }

using Vec = __m256;
using Mask = __m256i;

inline Mask lanes_from(int first) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1));
}
inline Mask lanes_between(int begin, int end) {
    return _mm256_andnot_si256(lanes_from(end), lanes_from(begin));
}
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load_over(Vec under, Mask mask, const float* p) {
    return _mm256_blendv_ps(under, _mm256_loadu_ps(p), _mm256_castsi256_ps(mask));
}
inline Vec load_only(Mask mask, const float* p) { return _mm256_maskload_ps(p, mask); }
inline Vec broadcast(float value) { return _mm256_set1_ps(value); }
inline Vec multiply_add(Vec a, Vec b, Vec sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Vec multiply_add_one(Vec a, const float* b, Vec sum) { return multiply_add(a, broadcast(*b), sum); }
inline Vec bounded(Vec v, Vec lowest, Vec highest) {
    return _mm256_min_ps(highest, _mm256_max_ps(lowest, v));
}
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(b, a); }
inline Vec in_order(Vec quarters) {
    const __m256d pairs = _mm256_castps_pd(quarters);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(pairs, _MM_SHUFFLE(3, 1, 2, 0)));
}
inline Vec even_lanes(Vec first, Vec second) {
    return in_order(_mm256_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0)));
}
inline Vec odd_lanes(Vec first, Vec second) {
    return in_order(_mm256_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1)));
}
inline Vec interleave_first(Vec even, Vec odd) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd),
                                  0x20);
}
inline Vec interleave_second(Vec even, Vec odd) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd),
                                  0x31);
}
// Interleaves the first two lanes of each half, and the last two.
inline Vec unpack_low(Vec even, Vec odd) { return _mm256_unpacklo_ps(even, odd); }
inline Vec unpack_high(Vec even, Vec odd) { return _mm256_unpackhi_ps(even, odd); }
// Four floats from each address.
inline Vec load_quarters(const float* const (&p)[2]) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p[0])), _mm_loadu_ps(p[1]), 1);
}
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }

#elif ECE408_LANES == 4

#define ECE408_STREAMS 0
constexpr bool kMasksSuppress = false;
constexpr bool kMasksProducts = false;

// 16 registers, one of them for the product: 8 sums, 2 inputs, 1 weight.
constexpr int kMaxFilters = 4;
constexpr int most_vectors(int) { return 2; }

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));

inline Mask lanes_from(int first) { return Mask{0, 1, 2, 3} >= first; }
inline Mask lanes_between(int begin, int end) { return lanes_from(begin) & ~lanes_from(end); }
inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline Vec one_of(Mask first, Vec a, Vec b) { return (Vec)((first & (Mask)a) | (~first & (Mask)b)); }
inline Vec load_over(Vec under, Mask mask, const float* p) {
    return one_of(mask, load(p), under);
}
inline Vec load_only(Mask mask, const float* p) {
    Vec v = {};
    for (int lane = 0; lane < kLanes; ++lane)
        if (mask[lane]) v[lane] = p[lane];
    return v;
}
inline Vec broadcast(float value) { return Vec{value, value, value, value}; }
inline Vec multiply_add(Vec a, Vec b, Vec sum) { return sum + a * b; }
inline Vec multiply_add_one(Vec a, const float* b, Vec sum) { return multiply_add(a, broadcast(*b), sum); }
inline Vec bounded(Vec v, Vec lowest, Vec highest) {
    v = one_of(v < lowest, lowest, v);
    return one_of(v > highest, highest, v);
}
inline Vec larger(Vec a, Vec b) { return one_of(a < b, b, a); }
inline Vec even_lanes(Vec first, Vec second) {
    return Vec{first[0], first[2], second[0], second[2]};
}
inline Vec odd_lanes(Vec first, Vec second) {
    return Vec{first[1], first[3], second[1], second[3]};
}
inline Vec interleave_first(Vec even, Vec odd) {
    return Vec{even[0], odd[0], even[1], odd[1]};
}
inline Vec interleave_second(Vec even, Vec odd) {
    return Vec{even[2], odd[2], even[3], odd[3]};
}
inline Vec unpack_low(Vec even, Vec odd) { return interleave_first(even, odd); }
inline Vec unpack_high(Vec even, Vec odd) { return interleave_second(even, odd); }
inline Vec load_quarters(const float* const (&p)[1]) { return load(p[0]); }
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

#endif

#if ECE408_LANES < 16
inline Vec multiply_add_only(Mask, Vec a, Vec b, Vec sum) { return multiply_add(a, b, sum); }
#endif

// A mask of the lanes whose number `picks` accepts.
template <class Picks>
inline Mask lanes_where(const Picks& picks) {
#if ECE408_LANES == 16
    unsigned lanes = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes |= picks(lane) ? 1u << lane : 0u;
    return static_cast<Mask>(lanes);
#else
    int32_t lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = picks(lane) ? -1 : 0;
    Mask mask;
    memcpy(&mask, lanes, sizeof mask);
    return mask;
#endif
}

#if ECE408_LANES < 16
// Stores lanes [begin, end) to p, or adds them to it.
inline void put_lanes(int begin, int end, float* p, Vec v, bool add) {
    if (!add && begin == 0 && end == kLanes) return store(p, v);
    float lanes[kLanes];
    store(lanes, v);
    for (int lane = begin; lane < end; ++lane) p[lane] = add ? p[lane] + lanes[lane] : lanes[lane];
}
#endif

}  // namespace
}  // namespace ece408
