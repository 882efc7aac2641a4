// Outputs of groups of one channel, each the sum of what it reads times the channel's weights: y
// from x, or dx from dy.
//
// Narrow outputs, and those that a thread has several columns of, go through shared memory, too, so
// that each 32 bytes of global memory are written once. Others are written straight away: a row's
// neighbouring threads fill whole sectors.
#pragma once

#include "depthwise.cuh"

constexpr bool kCollected = kColumns > 1 || kOutW < 32;

__device__ __forceinline__ void put(float *to, float sum) {
    if (ACCUMULATE) sum += *to;
    ACTIVATE(sum);
    __stcs(to, sum);
}

__device__ __forceinline__ void put(float4 *to, float4 sums) {
    if (ACCUMULATE) {
        const float4 old = *to;
        sums.x += old.x, sums.y += old.y, sums.z += old.z, sums.w += old.w;
    }
    ACTIVATE(sums.x);
    ACTIVATE(sums.y);
    ACTIVATE(sums.z);
    ACTIVATE(sums.w);
    __stcs(to, sums);
}

// Write a piece that lies in shared memory as `placed` has it.
__device__ __forceinline__ void write_out(float *to, const float *from, int floats) {
    const Piece piece(to, floats);
    float4 *whole = reinterpret_cast<float4 *>(to + piece.head);
    const float4 *sums = reinterpret_cast<const float4 *>(from + piece.head);
#pragma unroll 4
    for (int i = threadIdx.x; i < piece.body; i += THREADS) put(whole + i, sums[i]);
    if (piece.end() < piece.count) put(to + piece.end(), from[piece.end()]);
}

// A thread's outputs from the rows of its window, each of which is read once.
__device__ __forceinline__ void add_up(float (&sums)[ROWS][kColumns], const Window &window,
                                       const float (&weights)[kTaps]) {
#pragma unroll
    for (int h = kLeast; h <= kMost; h++) {
        float pixels[kColumns][KERNEL_W];
        window.read(pixels, h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int tap = 0; tap < kTaps; tap++) {
                const int p = tap / KERNEL_W, q = tap % KERNEL_W;
                if (!Down::reads(r, p) || Down::offset(r, p) != h) continue;
#pragma unroll
                for (int c = 0; c < kColumns; c++) {
                    if (Across::reads(c, q)) sums[r][c] += weights[tap] * pixels[c][q];
                }
            }
        }
    }
}

// All of a block's outputs; `planes` are those of all images.
__device__ __forceinline__ void gather(float *out, const float *in, const float *w,
                                       const float *bias, unsigned planes) {
    __shared__ Tile tile;
    __shared__ float4 out_space[kCollected ? vectors_for(kOutFloats) : 1];
    const unsigned plane0 = blockIdx.x / kBands * PLANES;
    const int held = PLANES == 1 ? 1 : min(PLANES, planes - plane0);
    const Band band(blockIdx.x % kBands);
    in += size_t(plane0) * kInPlane + band.first * kInW;
    out += size_t(plane0) * kOutPlane + band.row * kOutW;

    // Loops have more than one turn for one plane only, so the channel stays the same.
    const unsigned mine = min(threadIdx.x / kPlaneItems, held - 1);
    const unsigned channel = (plane0 + mine) % CHANNELS;
    Copy<kInFloats> copy;
    copy.load(in, band.in_floats(held));
    float weights[kTaps];
#pragma unroll
    for (int tap = 0; tap < kTaps; tap++) weights[tap] = __ldg(w + channel * kTaps + tap);
    const float start = BIAS ? __ldg(bias + channel) : 0;
    tile.store(copy);
    __syncthreads();

    float *collected = placed(out_space, out);
    for (int number = threadIdx.x; number < held * kPlaneItems; number += THREADS) {
        const Item item(number, band);
        float sums[ROWS][kColumns] = {};
        add_up(sums, Window(tile, copy.shift, band, item), weights);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
                if (!kEven && (item.row + r >= kOutH || item.column + c >= kOutW)) continue;
                const int row = item.plane * kOutH + item.row - band.row + r;
                const int at = row * kOutW + item.column + c;
                if (kCollected) {
                    collected[at] = sums[r][c] + start;
                } else {
                    put(out + at, sums[r][c] + start);
                }
            }
        }
    }
    if (kCollected) {
        __syncthreads();
        write_out(out, collected, band.out_floats(held));
    }
}
