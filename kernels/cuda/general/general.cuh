// Shared by the general kernels: types, the layer's shape, and a tile of a matrix product whose
// factors are functions.
#pragma once

#include <cuda_fp16.h>

#include "output.cuh"
#include "shape.cuh"

#ifndef ELEMENT
#define ELEMENT float  // of the arrays: float, double or __half
#define SUM float  // of the arithmetic: double for double, else float
#endif
#ifndef TOTAL
#define TOTAL SUM  // the type that adds up the sums of DEPTH_STEP products
#endif
#ifndef GROUPS
#define GROUPS 3
#endif

// A block has THREADS_R x THREADS_C threads, each with PER_ROW x PER_COLUMN elements of the
// product.
#ifndef THREADS_R
#define THREADS_R 4
#define THREADS_C 64
#define PER_ROW 4
#endif
#define PER_COLUMN 4
#define DEPTH_STEP 8

constexpr int kGroupChannels = CHANNELS / GROUPS;
constexpr int kGroupFilters = FILTERS / GROUPS;
constexpr int kThreads = THREADS_R * THREADS_C;
constexpr int kTileRows = THREADS_R * PER_ROW;
constexpr int kTileColumns = THREADS_C * PER_COLUMN;

// Sums of DEPTH_STEP products; of all products.
using Part = SUM[PER_ROW][PER_COLUMN];
using Sums = TOTAL[PER_ROW][PER_COLUMN];
constexpr bool kInParts = sizeof(TOTAL) > sizeof(SUM);

__device__ __forceinline__ SUM load(const ELEMENT *from) { return SUM(*from); }

// Writes one element of the output, rounded once.
__device__ __forceinline__ void store(ELEMENT *to, TOTAL sum) {
    if (ACCUMULATE) sum += TOTAL(*to);
    ACTIVATE(sum);
    *to = ELEMENT(sum);
}

// The element of x that a window's tap reads; zero in the padding. `image` is one channel.
__device__ __forceinline__ SUM pixel(const ELEMENT *channel, int i, int j, int p, int q) {
    const int h = i * STRIDE_H - PAD_H + p * DILATE_H, s = j * STRIDE_W - PAD_W + q * DILATE_W;
    const bool inside = unsigned(h) < HEIGHT && unsigned(s) < WIDTH;
    return inside ? load(channel + h * WIDTH + s) : SUM(0);
}

// Adds this thread's products of the block's rows and columns, one k after the other.
template <class Rows, class Columns, class Total>
__device__ __forceinline__ void add_products(const Rows &rows, const Columns &columns,
                                             Total (&sums)[PER_ROW][PER_COLUMN]) {
    const int tr = threadIdx.x / THREADS_C, tc = threadIdx.x % THREADS_C;
#pragma unroll
    for (int k = 0; k < DEPTH_STEP; k++) {
#pragma unroll
        for (int r = 0; r < PER_ROW; r++) {
#pragma unroll
            for (int c = 0; c < PER_COLUMN; c++) {
                sums[r][c] += rows[k][tr * PER_ROW + r] * columns[k][tc + c * THREADS_C];
            }
        }
    }
}

// The block's operands in shared memory. A kernel with several products has them once.
__device__ __forceinline__ auto &shared_rows() {
    __shared__ SUM rows[DEPTH_STEP][kTileRows + 1];
    return rows;
}
__device__ __forceinline__ auto &shared_columns() {
    __shared__ SUM columns[DEPTH_STEP][kTileColumns + 1];
    return columns;
}

// sums = sum over k in [begin, end) of row(r, k) * column(k, c), for this thread's r, c of the
// block's tile. With ROW_OF_K neighbouring threads load neighbouring k of `column`, else c.
template <bool ROW_OF_K, class Row, class Column>
__device__ void multiply(Sums &sums, int begin, int end, Row row, Column column) {
    auto &rows = shared_rows();
    auto &columns = shared_columns();
    const int thread = threadIdx.x;
    for (int k0 = begin; k0 < end; k0 += DEPTH_STEP) {
        __syncthreads();
        for (int i = thread; i < kTileRows * DEPTH_STEP; i += kThreads) {
            const int k = i % DEPTH_STEP, r = i / DEPTH_STEP;
            rows[k][r] = k0 + k < end ? row(r, k0 + k) : SUM(0);
        }
#pragma unroll
        for (int i = thread; i < kTileColumns * DEPTH_STEP; i += kThreads) {
            const int k = ROW_OF_K ? i % DEPTH_STEP : i / kTileColumns;
            const int c = ROW_OF_K ? i / DEPTH_STEP : i % kTileColumns;
            columns[k][c] = k0 + k < end ? column(k0 + k, c) : SUM(0);
        }
        __syncthreads();
        if constexpr (kInParts) {
            Part part = {};
            add_products(rows, columns, part);
#pragma unroll
            for (int r = 0; r < PER_ROW; r++) {
#pragma unroll
                for (int c = 0; c < PER_COLUMN; c++) sums[r][c] += part[r][c];
            }
        } else {
            add_products(rows, columns, sums);
        }
    }
}

// Calls f(sum, r, c) for each of this thread's elements of the tile.
template <class F>
__device__ __forceinline__ void for_each(const Sums &sums, F f) {
#pragma unroll
    for (int r = 0; r < PER_ROW; r++) {
#pragma unroll
        for (int c = 0; c < PER_COLUMN; c++) {
            f(sums[r][c], threadIdx.x / THREADS_C * PER_ROW + r,
              threadIdx.x % THREADS_C + c * THREADS_C);
        }
    }
}
