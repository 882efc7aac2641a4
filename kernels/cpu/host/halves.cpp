#include "host/halves.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define ECE408_F16C __attribute__((target("avx,f16c")))
#endif

#include "host/thread_pool.h"

namespace ece408 {
namespace {

// Elements that a thread converts at a time, and of a vector.
constexpr int64_t kBlock = 16 << 10, kVector = 8;

void convert(const Half* from, int64_t count, float* to) {
    for (int64_t k = 0; k < count; ++k) to[k] = portable_to_float(from[k]);
}

void convert(const float* from, int64_t count, Half* to) {
    for (int64_t k = 0; k < count; ++k) to[k] = portable_to_half(from[k]);
}

#if defined(__x86_64__)
ECE408_F16C void convert_vector(const Half* from, float* to) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    _mm256_storeu_ps(to, _mm256_cvtph_ps(halves));
}

ECE408_F16C void convert_vector(const float* from, Half* to) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

template <class From, class To>
ECE408_F16C void convert_vectors(const From* from, int64_t count, To* to) {
    int64_t k = 0;
    for (; k + kVector <= count; k += kVector) convert_vector(from + k, to + k);
    convert(from + k, count - k, to + k);
}
#endif

template <class From, class To>
void convert_all(const From* from, int64_t count, To* to, int threads, int isa) {
    parallel_for(threads, (count + kBlock - 1) / kBlock, [&](int64_t block, int) {
        const int64_t begin = block * kBlock, left = count - begin;
        const int64_t some = left < kBlock ? left : kBlock;
#if defined(__x86_64__)
        if (isa != ECE408_BASELINE) return convert_vectors(from + begin, some, to + begin);
#endif
        convert(from + begin, some, to + begin);
    });
    (void)isa;
}

}  // namespace

void to_floats(const Half* from, int64_t count, float* to, int threads, int isa) {
    convert_all(from, count, to, threads, isa);
}

void to_halves(const float* from, int64_t count, Half* to, int threads, int isa) {
    convert_all(from, count, to, threads, isa);
}

}  // namespace ece408
