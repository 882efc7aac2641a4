// Ceilings of the machine, for benchmarks: multiply-adds and memory bandwidth with one instruction
// set's vectors. Compiled once per instruction set, like direct.cpp.
#include "host/ceilings.h"

#include "host/thread_pool.h"
#include "micro/vector.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ece408 {
namespace {

// Independent sums, enough to hide the latency of a multiply-add on two units.
constexpr int kChains = 12;
constexpr int64_t kRounds = 1000;

// Makes the compiler assume that a value is used and changed.
inline void touch(Vec& v) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(v));
#else
    asm volatile("" : "+m"(v));
#endif
}

inline void store_past_caches(float* to, Vec v) {
#if ECE408_LANES == 16
    _mm512_stream_ps(to, v);
#elif ECE408_LANES == 8
    _mm256_stream_ps(to, v);
#elif defined(__SSE2__)
    _mm_stream_ps(to, (__m128)v);
#else
    store(to, v);
#endif
}

double multiply_adds(int64_t thousands, int threads) {
    parallel_for(threads, thousands, [](int64_t, int) {
        Vec sum[kChains];
        Vec a = broadcast(0.999f), b = broadcast(0.001f);
        ECE408_UNROLL
        for (int chain = 0; chain < kChains; ++chain) sum[chain] = b;
        for (int64_t round = 0; round < kRounds; ++round) {
            ECE408_UNROLL
            for (int chain = 0; chain < kChains; ++chain) {
                sum[chain] = multiply_add(sum[chain], a, b);
                touch(sum[chain]);
            }
        }
    });
    return 2.0 * static_cast<double>(thousands * kRounds * kChains * kLanes);
}

void store_all(float* to, int64_t floats, int threads) {
    const Vec value = broadcast(1.0f);
    const int64_t vectors = floats / kLanes;
    parallel_for(threads, vectors, [&](int64_t v, int) { store_past_caches(to + v * kLanes, value); });
}

void read_all(const float* from, int64_t floats, int threads) {
    const int64_t blocks = floats / (8 * kLanes);
    parallel_for(threads, blocks, [&](int64_t block, int) {
        for (int v = 0; v < 8; ++v) {
            Vec value = load(from + (block * 8 + v) * kLanes);
            touch(value);
        }
    });
}

}  // namespace

extern const Ceilings ECE408_THIS_BUILD(ceilings) = {multiply_adds, store_all, read_all};

}  // namespace ece408
