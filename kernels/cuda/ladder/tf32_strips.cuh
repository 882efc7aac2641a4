// What 10_tf32.cu and 11_3xtf32.cu have in common: whole images, or strips of their rows, in shared
// memory, from which lanes gather their pixels in the layout of the instruction.
#pragma once

#include <stdint.h>

#include "output.cuh"
#include "shape.cuh"

#ifndef QUAD
#define QUAD 4  // channels of a quad of k values, 4 or 2; with 2, a quad has two taps of each
#define WARPS 4
#define TILES 2  // tiles of 16 pixels that a warp computes at once
#define FILTER_TILES 3  // tiles of 8 filters that a block computes
#define STRIP_ROWS 29  // output rows whose input is in shared memory
#define BLOCKS 2
#endif

constexpr int kThreads = WARPS * 32;
constexpr int kQuadTaps = 4 / QUAD;
constexpr int kGroups = divide_up(CHANNELS, QUAD);
constexpr int kQuads = divide_up(kTaps, kQuadTaps);  // of a group of channels
constexpr int kSteps = divide_up(kQuads, 2);         // of 8 k values each
constexpr int kStrips = divide_up(kOutH, STRIP_ROWS);
constexpr int kStripPixels = (STRIP_ROWS + KERNEL_H - 1) * WIDTH;
// This pitch puts planes 8 (with two taps in a quad: 16) banks apart, so that a warp, 8
// neighbouring pixels by 4 k values, reads from 32 different banks.
constexpr int kBanks = QUAD == 4 ? 8 : 16;
constexpr int kPitch = kStripPixels + (kBanks + 32 - kStripPixels % 32) % 32;
constexpr int kBuffer = kGroups * QUAD * kPitch;

struct Shared {
    float2 weights[kGroups][kSteps][FILTER_TILES][32];
    float strip[kBuffer];
};
#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// The offset in a strip of tap number `tap`, or of the last one.
__host__ __device__ constexpr int tap_offset(int tap) {
    return tap < kTaps ? tap / KERNEL_W * WIDTH + tap % KERNEL_W : tap_offset(kTaps - 1);
}

// d += a * b for a of 16 pixels x 8, b of 8 x 8 filters.
__device__ __forceinline__ void multiply(float (&d)[4], const float (&a)[4], float2 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}

using Tiles = float[TILES][FILTER_TILES][4];

__device__ __forceinline__ void clear(Tiles &tiles) {
#pragma unroll
    for (int i = 0; i < TILES * FILTER_TILES * 4; i++) (&tiles[0][0][0])[i] = 0;
}

// Stores weights in the layout of the instruction: k value lane % 4 of both quads, filter lane / 4.
template <class Prepare>
__device__ void load_weights(Shared &shared, const float *w, int filter0, Prepare prepare) {
    float2 *to = &shared.weights[0][0][0][0];
    for (int i = threadIdx.x; i < kGroups * kSteps * FILTER_TILES * 32; i += kThreads) {
        const int lane = i % 32, step = i / 32 / FILTER_TILES % kSteps;
        const int group = i / 32 / FILTER_TILES / kSteps;
        const int filter = filter0 + i / 32 % FILTER_TILES * 8 + lane / 4;
        const int c = group * QUAD + lane % QUAD;
        float b[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int tap = (step * 2 + half) * kQuadTaps + lane % 4 / QUAD;
            const bool inside = filter < FILTERS && c < CHANNELS && tap < kTaps;
            b[half] = inside ? w[(filter * CHANNELS + c) * kTaps + tap] : 0;
        }
        to[i] = make_float2(prepare(b[0]), prepare(b[1]));
    }
}

// Starts to copy a strip's input; the channels that fill up the last group stay zero.
__device__ void fetch(float *strip, const float *x, unsigned unit) {
    const int row0 = unit % kStrips * STRIP_ROWS;
    const int pixels = min(kStripPixels, (HEIGHT - row0) * WIDTH);
    const float *from = x + unit / kStrips * kImage + row0 * WIDTH;
    for (int c = 0; c < CHANNELS; c++) {
        for (int i = threadIdx.x; i < pixels; i += kThreads) {
            const uint32_t to = __cvta_generic_to_shared(strip + c * kPitch + i);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to),
                         "l"(from + c * kPlane + i));
        }
    }
    asm volatile("cp.async.commit_group;");
}

// The sums of TILES tiles of pixels from `tile0` on, for all channels, taps and filters.
// `add(sum, step, pixel, weights)` adds the products of a step, of pixels pixel(i, j) of tile i.
template <class Add>
__device__ __forceinline__ void compute(Tiles &sum, const Shared &shared, const float *strip,
                                        int tile0, int last_pixel, Add add) {
    const int lane = threadIdx.x % 32, part = lane % 4 / QUAD;
    const float *window[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int pixel = min((tile0 + i) * 16 + lane / 4 + 8 * j, last_pixel);
            window[i][j] = strip + pixel / kOutW * WIDTH + pixel % kOutW + lane % QUAD * kPitch;
        }
    }
    const float2 *weights = &shared.weights[0][0][0][lane];
#pragma unroll 1
    for (int group = 0; group < kGroups; group++) {
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            const auto pixel = [&](int i, int j) {
                const int tap = (step * 2 + j / 2) * kQuadTaps;
                const int offset = tap_offset(tap);
                const int next = kQuadTaps == 2 ? tap_offset(tap + 1) - offset : 0;
                return window[i][j % 2][offset + part * next];
            };
            add(sum, step, pixel, weights + step * FILTER_TILES * 32);
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            window[i][0] += QUAD * kPitch;
            window[i][1] += QUAD * kPitch;
        }
        weights += kSteps * FILTER_TILES * 32;
    }
}

// The whole convolution; `prepare` is applied to each weight.
template <class Prepare, class Add>
__device__ __forceinline__ void convolve_strips(float *y, const float *x, const float *w,
                                                const float *bias, int batch, Prepare prepare,
                                                Add add) {
    extern __shared__ __align__(16) char memory[];
    Shared &shared = *(Shared *)memory;
    const int filter0 = blockIdx.y * FILTER_TILES * 8;
    const unsigned units = batch * kStrips;  // an image's strips are the units of work
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    load_weights(shared, w, filter0, prepare);
    for (int i = CHANNELS * kPitch + threadIdx.x; i < kBuffer; i += kThreads) shared.strip[i] = 0;
    for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
        __syncthreads();
        fetch(shared.strip, x, unit);
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        const int row0 = unit % kStrips * STRIP_ROWS;
        const int pixels = min(STRIP_ROWS, kOutH - row0) * kOutW;
        float *out = y + unit / kStrips * kOutImage + row0 * kOutW;
        for (int tile0 = warp * TILES; tile0 * 16 < pixels; tile0 += WARPS * TILES) {
            Tiles sum;
            clear(sum);
            compute(sum, shared, shared.strip, tile0, pixels - 1, add);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int n = 0; n < FILTER_TILES; n++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int pixel = (tile0 + i) * 16 + lane / 4 + j / 2 * 8;
                        const int filter = filter0 + n * 8 + lane % 4 * 2 + j % 2;
                        if (pixel < pixels && filter < FILTERS) {
                            store(out + filter * kOutPlane + pixel, sum[i][n][j], bias, filter);
                        }
                    }
                }
            }
        }
    }
}
