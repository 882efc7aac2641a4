// Hopper's asynchronous tensor cores (wgmma): fp16, or the type in MULTIPLIED, from shared memory,
// with float32 sums.
#pragma once

#include <stdint.h>

#ifndef MULTIPLIED  // the PTX type of the operands
#define MULTIPLIED "f16"
#endif

// An address in the block's shared memory, in units of 16 bytes. In a cluster, its upper bits
// select the block.
__device__ __forceinline__ uint64_t place_of(const void *matrix) {
    return (__cvta_generic_to_shared(matrix) & 0x3ffff) >> 4;
}

// The descriptor of a matrix in shared memory: its address, and the distance along k of the blocks
// of 8 rows x 16 bytes (8 values of k); along the rows, blocks are contiguous. All in units of 16
// bytes.
__device__ __forceinline__ uint64_t describe(const void *matrix, int along_k) {
    return place_of(matrix) | uint64_t(along_k) << 16 | uint64_t(8) << 32;
}

// The same for matrices whose records hold 8 rows of one k, with contiguous k: `along_rows` is the
// distance between records of neighbouring blocks of 8 rows.
__device__ __forceinline__ uint64_t describe_by_rows(const void *matrix, int along_rows) {
    return place_of(matrix) | uint64_t(8) << 16 | uint64_t(along_rows) << 32;
}

// Operands of the instruction by the number of a thread's sums, and their names in the assembly.
#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS8(i) SUMS4(i), SUMS4(i + 4)
#define SUMS12(i) SUMS8(i), SUMS4(i + 8)
#define SUMS16(i) SUMS8(i), SUMS8(i + 8)
#define SUMS24(i) SUMS16(i), SUMS8(i + 16)
#define SUMS32(i) SUMS16(i), SUMS16(i + 16)
#define SUMS64(i) SUMS32(i), SUMS32(i + 32)
#define NAMES4 "%0, %1, %2, %3"
#define NAMES8 NAMES4 ", %4, %5, %6, %7"
#define NAMES12 NAMES8 ", %8, %9, %10, %11"
#define NAMES16 NAMES12 ", %12, %13, %14, %15"
#define NAMES24 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES32 NAMES24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                        \
    NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
            "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "   \
            "%60, %61, %62, %63"

// The instruction for N columns with COUNT sums in each thread; FACTORS, ADD and FLAGS are text.
#define MULTIPLY(N, COUNT, FACTORS, ADD, FLAGS, ...)                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD ", 0;\n"                            \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." MULTIPLIED "." MULTIPLIED \
                 " {" NAMES##COUNT "}, " FACTORS ", p, " FLAGS ";\n}"                        \
                 : SUMS##COUNT(0)                                                            \
                 : __VA_ARGS__, "r"(add))

// d = a * b, plus d with `add`: 64 rows x 16 values of k by 2 columns for each of a thread's sums.
// Of a tile of 8 columns, a thread has 4 sums: rows lane / 4 and lane / 4 + 8 of its warp's 16,
// columns lane % 4 * 2 and the next.
#define DEFINE_MULTIPLY(N, COUNT, A, B, ADD)                                            \
    __device__ __forceinline__ void multiply(float (&d)[COUNT], uint64_t a, uint64_t b, \
                                             int add) {                                 \
        MULTIPLY(N, COUNT, A ", " B, ADD, "1, 1, 0, 0", "l"(a), "l"(b));                \
    }
DEFINE_MULTIPLY(8, 4, "%4", "%5", "%6")
DEFINE_MULTIPLY(16, 8, "%8", "%9", "%10")
DEFINE_MULTIPLY(24, 12, "%12", "%13", "%14")
DEFINE_MULTIPLY(32, 16, "%16", "%17", "%18")
DEFINE_MULTIPLY(48, 24, "%24", "%25", "%26")
DEFINE_MULTIPLY(64, 32, "%32", "%33", "%34")
DEFINE_MULTIPLY(128, 64, "%64", "%65", "%66")
#undef DEFINE_MULTIPLY

// d = a * b for UNITS * 8 values of k, plus d with `add`. `along_a` and `along_b` are records
// between units of k.
template <int UNITS, int N>
__device__ __forceinline__ void multiply_slab(float (&d)[N], uint64_t a, uint64_t b, int along_a,
                                              int along_b, int add) {
#pragma unroll
    for (int unit = 0; unit < UNITS; unit += 2) {
        multiply(d, a + unit * along_a, b + unit * along_b, add || unit > 0);
    }
}

// d = a * b of numbers split into COUNT parts, contiguous slabs. Products of small parts come
// first: tensor cores truncate the sum at each step, which costs little while the sum is small.
// Products below a float's last bit are omitted.
template <int COUNT, int UNITS, int N>
__device__ __forceinline__ void multiply_parts(float (&d)[N], uint64_t a, uint64_t b, int along_a,
                                               int along_b) {
#pragma unroll
    for (int both = COUNT - 1; both >= 0; both--) {
#pragma unroll
        for (int part = both; part >= 0; part--) {
            multiply_slab<UNITS>(d, a + part * UNITS * along_a, b + (both - part) * UNITS * along_b,
                                 along_a, along_b, both < COUNT - 1 || part < both);
        }
    }
}

// d = a * b, plus d with `add`, with a in registers: rows lane / 4 and lane / 4 + 8 of a warp's 16,
// for k of lane % 4 * 2 and the next, and then for those plus 8. b is by rows.
#define ROWS_OF_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define DEFINE_MULTIPLY(N, COUNT, A, B, ADD)                                            \
    __device__ __forceinline__ void multiply(float (&d)[COUNT], const uint32_t (&a)[4], \
                                             uint64_t b, int add) {                     \
        MULTIPLY(N, COUNT, "{" A "}, " B, ADD, "1, 1, 1", ROWS_OF_A, "l"(b));           \
    }
DEFINE_MULTIPLY(16, 8, "%8, %9, %10, %11", "%12", "%13")
DEFINE_MULTIPLY(32, 16, "%16, %17, %18, %19", "%20", "%21")
DEFINE_MULTIPLY(64, 32, "%32, %33, %34, %35", "%36", "%37")
DEFINE_MULTIPLY(128, 64, "%64, %65, %66, %67", "%68", "%69")
#undef DEFINE_MULTIPLY
#undef ROWS_OF_A
#undef MULTIPLY

// Loads a warp's 16 rows for 16 values of k (ldmatrix), from records of 8 rows of one k. `of_lane`
// is the record at load_rows_at.
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], const void *of_lane) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"((unsigned)__cvta_generic_to_shared(of_lane))
                 : "memory");
}

// This lane's record for load_rows, relative to the first one; rows 0 to 7 and 8 to 15 are
// `along_rows` apart.
__device__ __forceinline__ int load_rows_at(int along_rows) {
    const int lane = threadIdx.x % 32;
    return lane / 8 % 2 * along_rows + lane / 16 * 8 + lane % 8;
}

// Keeps the compiler from moving registers that an asynchronous product uses.
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

// Makes this thread's writes to shared memory visible to the tensor cores after the next barrier.
__device__ __forceinline__ void show_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void begin_multiplying() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of the products started since the last call.
__device__ __forceinline__ void multiplying_begun() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all but the newest groups.
template <int newest>
__device__ __forceinline__ void multiplied() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(newest) : "memory");
}

__device__ __forceinline__ void multiply_now() {
    multiplying_begun();
    multiplied<0>();
}
