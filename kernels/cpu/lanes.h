// Vectors of float or double as wide as the instruction set's, by the compiler's own vectors.
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
    // Less zero is the value itself, and compiles to nothing; plus zero is not, for -0.
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

inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace
}  // namespace ece408
