// Hopper's asynchronous tensor cores (wgmma): half precision from shared memory, sums in float32.
#pragma once

#include <stdint.h>

// What the unit is told about a matrix in shared memory: where it is, how far apart the blocks of
// 8 rows x 16 bytes (8 values of k) lie along k, and that along the rows they follow each other;
// all in units of 16 bytes.
__device__ __forceinline__ uint64_t describe(const void *matrix, int along_k) {
    const uint64_t address = __cvta_generic_to_shared(matrix);
    return address >> 4 | uint64_t(along_k) << 16 | uint64_t(8) << 32;
}

// The same for matrices whose records hold 8 rows for each k, one k behind the other: `along_rows`
// is how far apart the records of 8 rows and of the next 8 are.
__device__ __forceinline__ uint64_t describe_by_rows(const void *matrix, int along_rows) {
    const uint64_t address = __cvta_generic_to_shared(matrix);
    return address >> 4 | uint64_t(8) << 16 | uint64_t(along_rows) << 32;
}

// d = a * b, plus d with `add`: 64 rows x 16 values of k by 2 columns for each of a thread's sums.
// Of a tile of 8 columns a thread has 4 sums: of its warp's 16 rows number lane / 4 and that plus
// 8, of the columns lane % 4 * 2 and the next. `by_rows`: both matrices are of the
// second kind.
#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
__device__ __forceinline__ void multiply(float (&d)[4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
        "%0, %1, %2, %3}, "
        "%4, %5, p, 1, 1, 0, 0;\n}"
        : SUMS4(0)
        : "l"(a), "l"(b), "r"(add));
}

template <int by_rows = 0>
__device__ __forceinline__ void multiply(float (&d)[8], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, p, 1, 1, %11, %11;\n}"
        : SUMS4(0), SUMS4(4)
        : "l"(a), "l"(b), "r"(add), "n"(by_rows));
}

__device__ __forceinline__ void multiply(float (&d)[12], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
        "%12, %13, p, 1, 1, 0, 0;\n}"
        : SUMS4(0), SUMS4(4), SUMS4(8)
        : "l"(a), "l"(b), "r"(add));
}

template <int by_rows = 0>
__device__ __forceinline__ void multiply(float (&d)[16], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, %19, %19;\n}"
        : SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12)
        : "l"(a), "l"(b), "r"(add), "n"(by_rows));
}

__device__ __forceinline__ void multiply(float (&d)[24], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, "
        "%24, %25, p, 1, 1, 0, 0;\n}"
        : SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12), SUMS4(16), SUMS4(20)
        : "l"(a), "l"(b), "r"(add));
}

template <int by_rows = 0>
__device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, %35, %35;\n}"
        : SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12), SUMS4(16), SUMS4(20), SUMS4(24), SUMS4(28)
        : "l"(a), "l"(b), "r"(add), "n"(by_rows));
}

template <int by_rows = 0>
__device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, %67, %67;\n}"
        : SUMS4(0), SUMS4(4), SUMS4(8), SUMS4(12), SUMS4(16), SUMS4(20), SUMS4(24), SUMS4(28),
          SUMS4(32), SUMS4(36), SUMS4(40), SUMS4(44), SUMS4(48), SUMS4(52), SUMS4(56), SUMS4(60)
        : "l"(a), "l"(b), "r"(add), "n"(by_rows));
}

#undef SUMS4

// Keeps the compiler from touching registers that the unit works on.
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

__device__ __forceinline__ void begin_multiplying() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void finish_multiplying() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
