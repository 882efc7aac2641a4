// Tensor cores by warp (mma.sync), for Ampere and later GPUs: fp16, or the type in MULTIPLIED, from
// shared memory, with float32 sums. Names are those of wgmma.cuh; here sums are complete when a
// function returns.
#pragma once

#include <stdint.h>

#ifndef MULTIPLIED  // the PTX type of the operands
#define MULTIPLIED "f16"
#endif

// A matrix in shared memory of 16-byte records of 8 values of k; records of neighbouring rows are
// contiguous. Adding n to the description moves it by n records.
__device__ __forceinline__ uint64_t describe(const void *matrix, int) {
    return __cvta_generic_to_shared(matrix) >> 4;
}

// Four matrices of 8 records (ldmatrix): the lane gives the address of record lane % 8 of matrix
// lane / 8, and gets two values of record lane / 4 of each.
__device__ __forceinline__ void load_records(uint32_t (&values)[4], unsigned record) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(record * 16)
                 : "memory");
}

// The same of 16 rows of one k each, from two of 8 columns: the lane gives the address of 8 columns
// of row lane % 16, and gets two values of k of column lane / 4, for k and then for k + 8, of each.
__device__ __forceinline__ void load_transposed(uint32_t (&values)[4], const void *of_lane) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"((unsigned)__cvta_generic_to_shared(of_lane))
                 : "memory");
}

// d += a * b: 16 rows x 16 values of k by 8 columns.
__device__ __forceinline__ void multiply(float *d, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." MULTIPLIED "." MULTIPLIED ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a * b of numbers split into COUNT parts: 16 rows x 16 values of k by 16 columns.
template <int COUNT>
__device__ __forceinline__ void multiply_both(float *d, const uint32_t (&a)[COUNT][4],
                                              const uint32_t (&b)[COUNT][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int both = COUNT - 1; both >= 0; both--) {
#pragma unroll
            for (int part = both; part >= 0; part--) {
                const uint32_t(&columns)[4] = b[both - part];
                multiply(d + 4 * half, a[part], columns[2 * half], columns[2 * half + 1]);
            }
        }
    }
}

// d = a * b for UNITS * 8 values of k, of numbers split into COUNT parts: 64 rows, 16 for each of
// four warps, by 2 columns for each of a thread's sums, in the layout of wgmma.cuh. `along_a` and
// `along_b` are records between units of k; a part follows all units of the previous one. Products
// below a float's last bit are omitted. Small products do not all come first, unlike in wgmma.cuh:
// a warp would have to read its columns twice, or hold those of all units in registers, which took
// a tenth more time.
template <int COUNT, int UNITS, int N>
__device__ __forceinline__ void multiply_parts(float (&d)[N], uint64_t a, uint64_t b, int along_a,
                                               int along_b) {
    static_assert(N % 8 == 0, "16 columns at once");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned row = unsigned(a) + lane / 16 * along_a + warp * 16 + lane % 16;
    const unsigned column = unsigned(b) + lane / 8 % 2 * along_b + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = 0;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit += 2) {
        uint32_t rows[COUNT][4];
#pragma unroll
        for (int part = 0; part < COUNT; part++) {
            load_records(rows[part], row + (part * UNITS + unit) * along_a);
        }
#pragma unroll
        for (int i = 0; i < N; i += 8) {
            uint32_t columns[COUNT][4];
#pragma unroll
            for (int part = 0; part < COUNT; part++) {
                load_records(columns[part], column + 2 * i + (part * UNITS + unit) * along_b);
            }
            multiply_both(d + i, rows, columns);
        }
    }
}

template <int N>
__device__ __forceinline__ void hold(float (&)[N]) {}
__device__ __forceinline__ void show_writes() {}
__device__ __forceinline__ void begin_multiplying() {}
__device__ __forceinline__ void multiplying_begun() {}
template <int newest>
__device__ __forceinline__ void multiplied() {}
