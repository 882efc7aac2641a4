// What the kinds of steps share: their places in memory, and the functions that compute them.
#pragma once

#include "api/builds.h"
#include "network/program.h"

namespace ece408 {

// A step of a call of ece408_run.
struct Step {
    const ece408_step& of;
    void* const* bases;
    int threads, isa;
};

// All return an ece408_status.
int copy_strided(const Step& step);
int pool_planes(const Step& step);
int pool_gradient(const Step& step);
int normalise_channels(const Step& step);
int resize_planes(const Step& step);

struct Pointwise {
    int (*compute)(const Step& step);
};
struct Rows {
    int (*reduce)(const Step& step);
    int (*softmax)(const Step& step);
    int (*one_hot)(const Step& step);
};

ECE408_DECLARE_BUILDS(Pointwise, pointwise)
ECE408_DECLARE_BUILDS(Rows, rows)

namespace {

// The first element at a place; null without an array.
template <class T = float>
T* at(const Step& step, const ece408_operand& place) {
    if (place.base < 0) return nullptr;
    return reinterpret_cast<T*>(static_cast<char*>(step.bases[place.base]) + place.offset);
}
inline const float* input(const Step& step, int number) { return at(step, step.of.in[number]); }
inline float* output(const Step& step) { return at(step, step.of.out); }

// The number of threads with enough to do, if an element takes as long as `cost` sums: handing work
// to a thread takes as long as many sums.
inline int useful_threads(const Step& step, int64_t elements, int64_t cost) {
    constexpr int64_t kLeast = 1 << 14;
    const int64_t most = 1 + elements * cost / kLeast;
    return most < step.threads ? static_cast<int>(most) : step.threads;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }

}  // namespace
}  // namespace ece408
