// Replaces CUDA's header of this name for kernels on the CPU: the language extensions of kernels
// (CUDA C++ Programming Guide, "C++ Language Extensions") and the runtime functions of small
// programs.
#pragma once

#include <cassert>
#include <cfloat>
#include <climits>
// CUDA lacks C++17's special functions (Bessel's and others), which are two thirds of the header.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <math.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulated.h"
#include "errors.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
// Padding after the variable catches indices that are too large.
#define __constant__ __attribute__((aligned(1024)))
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __cluster_dims__(...) ECE408_EMULATOR_HAS_NO_CLUSTERS

constexpr int warpSize = 32;

#include "vector_types.h"

// --- Waiting, fences, votes and shuffles.

void __syncthreads(ECE408_CALLER);
int __syncthreads_count(int predicate, ECE408_CALLER);
int __syncthreads_and(int predicate, ECE408_CALLER);
int __syncthreads_or(int predicate, ECE408_CALLER);

inline void __syncwarp(unsigned mask = 0xFFFFFFFF, ECE408_CALLER) {
    ece408_emulator::together({file, line}, ece408_emulator::Warp::SYNC, mask, 0);
}
inline void __threadfence() { ece408_emulator::fence(); }
inline void __threadfence_block() { ece408_emulator::fence_block(); }
inline void __threadfence_system() { ece408_emulator::fence(); }
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap(ECE408_CALLER) {
    ece408_emulator::trap({file, line}, "__trap() is called");
}
inline void __brkpt() {}

inline unsigned __activemask(ECE408_CALLER) { return ece408_emulator::active_lanes({file, line}); }
inline unsigned __ballot_sync(unsigned mask, int predicate, ECE408_CALLER) {
    return ece408_emulator::together({file, line}, ece408_emulator::Warp::BALLOT, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate, ECE408_CALLER) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, ECE408_CALLER) {
    return __ballot_sync(mask, !predicate, file, line) == 0;
}

namespace ece408_emulator {

template <class T>
ECE408_UNCHECKED inline uint64_t bits(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle takes at most 8 bytes");
    uint64_t found = 0;
    memcpy(&found, &value, sizeof value);
    return found;
}

template <class T>
ECE408_UNCHECKED inline T value_of(uint64_t bits) {
    T found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

}  // namespace ece408_emulator

#define ECE408_SHUFFLE(name, what)                                                              \
    template <class T>                                                                          \
    inline T name(unsigned mask, T value, int lane, int width = warpSize, ECE408_CALLER) {      \
        return ece408_emulator::value_of<T>(                                                    \
            ece408_emulator::together({file, line}, ece408_emulator::Warp::what, mask,          \
                                      ece408_emulator::bits(value), lane, width));              \
    }
ECE408_SHUFFLE(__shfl_sync, INDEX)
ECE408_SHUFFLE(__shfl_up_sync, UP)
ECE408_SHUFFLE(__shfl_down_sync, DOWN)
ECE408_SHUFFLE(__shfl_xor_sync, XOR)
#undef ECE408_SHUFFLE

template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, ECE408_CALLER) {
    return ece408_emulator::together({file, line}, ece408_emulator::Warp::MATCH, mask,
                                     ece408_emulator::bits(value));
}

#define ECE408_REDUCE(name, type, what)                                                       \
    inline type name(unsigned mask, type value, ECE408_CALLER) {                              \
        return ece408_emulator::together({file, line}, ece408_emulator::Warp::what, mask,     \
                                         unsigned(value));                                    \
    }
ECE408_REDUCE(__reduce_add_sync, int, ADD)
ECE408_REDUCE(__reduce_add_sync, unsigned, ADD)
ECE408_REDUCE(__reduce_min_sync, int, MIN)
ECE408_REDUCE(__reduce_max_sync, int, MAX)
ECE408_REDUCE(__reduce_min_sync, unsigned, UMIN)
ECE408_REDUCE(__reduce_max_sync, unsigned, UMAX)
ECE408_REDUCE(__reduce_and_sync, unsigned, AND)
ECE408_REDUCE(__reduce_or_sync, unsigned, OR)
ECE408_REDUCE(__reduce_xor_sync, unsigned, EXCLUSIVE_OR)
#undef ECE408_REDUCE

// --- Atomic functions.

#define ECE408_ATOMIC(name, may_spin, next)                                                   \
    template <class T, class U>                                                               \
    ECE408_UNCHECKED inline T name(T* address, U other, ECE408_CALLER) {                      \
        ece408_emulator::atomic({file, line}, address, sizeof(T), may_spin);                  \
        const T value = static_cast<T>(other);                                                \
        T old, made;                                                                          \
        __atomic_load(address, &old, __ATOMIC_RELAXED);                                       \
        do {                                                                                  \
            made = next;                                                                      \
        } while (!__atomic_compare_exchange(address, &old, &made, false, __ATOMIC_SEQ_CST,    \
                                            __ATOMIC_RELAXED));                               \
        return old;                                                                           \
    }
ECE408_ATOMIC(atomicAdd, true, old + value)
ECE408_ATOMIC(atomicSub, true, old - value)
ECE408_ATOMIC(atomicExch, true, value)
ECE408_ATOMIC(atomicMin, false, old < value ? old : value)
ECE408_ATOMIC(atomicMax, false, old > value ? old : value)
ECE408_ATOMIC(atomicAnd, false, old & value)
ECE408_ATOMIC(atomicOr, true, old | value)
ECE408_ATOMIC(atomicXor, false, old ^ value)
ECE408_ATOMIC(atomicInc, false, old >= value ? 0 : old + 1)
ECE408_ATOMIC(atomicDec, false, old == 0 || old > value ? value : old - 1)
#undef ECE408_ATOMIC
#define atomicAdd_block atomicAdd
#define atomicAdd_system atomicAdd

template <class T, class U, class V>
ECE408_UNCHECKED inline T atomicCAS(T* address, U expected, V other, ECE408_CALLER) {
    ece408_emulator::atomic({file, line}, address, sizeof(T), true, true);
    T old = static_cast<T>(expected), made = static_cast<T>(other);
    __atomic_compare_exchange(address, &old, &made, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    return old;
}

// Called by assert instead of the C library's function, which ends the process.
extern "C" __attribute__((weak, visibility("hidden"))) void __assert_fail(
    const char* text, const char* file, unsigned line, const char*) noexcept {
    ece408_emulator::fail_assertion({file, static_cast<int>(line)}, text);
}

#include "device_functions.h"
#include "runtime_api.h"
