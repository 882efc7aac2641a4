// Vectors of float or double as wide as the instruction set's, by the compiler's vector extension.
#pragma once

#include <stdint.h>

namespace ece408 {
namespace {

template <class T>
struct Lanes {
    static constexpr int64_t count = ECE408_LANES * 4 / sizeof(T);
    typedef T Vec __attribute__((vector_size(ECE408_LANES * 4)));
    typedef T Unaligned __attribute__((vector_size(ECE408_LANES * 4), aligned(sizeof(T)), may_alias));

    static Vec load(const T* p) { return *reinterpret_cast<const Unaligned*>(p); }
    static void store(T* p, Vec v) { *reinterpret_cast<Unaligned*>(p) = v; }
    // Subtracting zero keeps the value and compiles to nothing; adding zero would not, for -0.
    static Vec broadcast(T value) { return value - Vec{}; }
    static T sum(Vec v) {
        T total = 0;
        for (int64_t lane = 0; lane < count; ++lane) total += v[lane];
        return total;
    }
};

// Filters by vectors of a register tile.
constexpr int kTileFilters = ECE408_LANES == 16 ? 8 : 4;
constexpr int kTileVectors = ECE408_LANES == 16 ? 3 : 2;

// Whether all `count` numbers are finite: only then each, times zero, is zero.
template <class T>
bool all_finite(const T* p, int64_t count) {
    using L = Lanes<T>;
    typename L::Vec sum[4] = {};
    int64_t k = 0;
    for (; k + 4 * L::count <= count; k += 4 * L::count)
        for (int64_t i = 0; i < 4; ++i) sum[i] += L::load(p + k + i * L::count) * T(0);
    for (; k + L::count <= count; k += L::count) sum[0] += L::load(p + k) * T(0);
    T rest = L::sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; k < count; ++k) rest += p[k] * T(0);
    return rest == 0;
}

inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace
}  // namespace ece408
