// Shared by implicit_gemm_prepacked.cu and its gradient for w: the layer's shape, the padded grid
// that holds an image's pixels, the taps' offsets in that grid, and packed fp16 records.
#pragma once

#include <stdint.h>

#include "split_fp16x2.cuh"
#include "output.cuh"

#ifndef BACKWARD
#define BACKWARD 0  // 1: x is dy, y is dx, rows are channels
#endif
#ifndef PARTS
#define PARTS 2  // fp16 parts of a number: 2, or 1 where 11 bits suffice
#endif
#ifndef ELEMENT
#define ELEMENT float  // of weights and gradients: float or __half
#endif

// The layer. Default: 64 filters of 3x3, padding 1, on 64 channels of 56x56 pixels.
#ifndef KERNEL_H
#define KERNEL_H 3
#define KERNEL_W 3
#define STRIDE_H 1
#define STRIDE_W 1
#define PAD_H 1
#define PAD_W 1
#define DILATE_H 1
#define DILATE_W 1
#define IN_CHANNELS 64
#define IN_H 56
#define IN_W 56
#define OUT_CHANNELS 64
#define OUT_H 56
#define OUT_W 56
#define GROUPS 1
#endif

// The grid of one image: its size; the input pixel at its first row and column; the pixels between
// neighbouring grid rows and columns (the step); first pixel and step of the output. Outputs are
// the first VALID_H rows and VALID_W columns.
#ifndef GRID_H
#define GRID_H 57
#define GRID_W 57
#define IN_FIRST_H -1
#define IN_FIRST_W -1
#define IN_STEP_H 1
#define IN_STEP_W 1
#define OUT_FIRST_H 0
#define OUT_FIRST_W 0
#define OUT_STEP_H 1
#define OUT_STEP_W 1
#define VALID_H 56
#define VALID_W 56
#endif

// Sets of groups; FOLD: stride remainders become channels; FOLD_TAPS: the taps of a row, too.
// LAST_H and LAST_W: the grid row and column of a kernel's first tap, for the gradient for x.
#ifndef SETS
#define SETS 1
#define FOLD 0
#define FOLD_TAPS 0
#define LAST_H 0
#define LAST_W 0
#endif

__host__ __device__ constexpr int divide_up(int count, int size) {
    return (count + size - 1) / size;
}

constexpr int kFoldH = FOLD ? STRIDE_H : 1, kFoldW = FOLD ? STRIDE_W : 1;
constexpr int kFoldedTaps = FOLD_TAPS ? (KERNEL_W - 1) * DILATE_W / kFoldW + 1 : 1;
constexpr int kFold = kFoldH * kFoldW * kFoldedTaps;
static_assert(!FOLD_TAPS || (!BACKWARD && (FOLD || STRIDE_W == 1)));
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kSetIn = IN_CHANNELS / SETS, kSetOut = OUT_CHANNELS / SETS;
constexpr int kGroupIn = IN_CHANNELS / GROUPS, kGroupOut = OUT_CHANNELS / GROUPS;
constexpr int kDepth = kSetIn * (BACKWARD ? 1 : kFold);  // of the GEMM's k, for each tap
constexpr int kSetRows = kSetOut * (BACKWARD ? kFold : 1);
constexpr unsigned kPositions = GRID_H * GRID_W;   // of one image
constexpr unsigned kInPlane = IN_H * IN_W, kOutPlane = OUT_H * OUT_W;
#ifndef OUT_IMAGE
#define OUT_IMAGE (OUT_CHANNELS * kOutPlane)  // output elements between images
#endif
#ifndef IN_IMAGE
#define IN_IMAGE (IN_CHANNELS * kInPlane)  // input elements between images
#endif

// The taps of one stride remainder along an axis: their number, and the grid offset of the i-th
// one. With FOLD, the taps of all remainders.
struct AxisTaps {
    int kernel, stride, dilate, last;
    bool folded;  // its taps are channels, at one offset

    __host__ __device__ constexpr int reach() const { return (kernel - 1) * dilate; }

    // The largest offset.
    __host__ __device__ constexpr int last_place() const {
        return folded ? 0 : BACKWARD ? last : reach() / stride;
    }

    __host__ __device__ constexpr int count(int remainder) const {
        if (folded) return 1;
        if (FOLD) return reach() / stride + 1;
        int count = 0;
        for (int tap = 0; tap <= reach(); tap += dilate) count += tap % stride == remainder;
        return count;
    }

    __host__ __device__ constexpr int place(int remainder, int i) const {
        if (folded) return 0;
        if (FOLD) return BACKWARD ? last - i : i;
        for (int tap = 0; tap <= reach(); tap += dilate) {
            if (tap % stride == remainder && i-- == 0) {
                return BACKWARD ? last - tap / stride : tap / stride;
            }
        }
        return 0;
    }
};

constexpr AxisTaps kDown = {KERNEL_H, STRIDE_H, DILATE_H, LAST_H, false};
constexpr AxisTaps kAcross = {KERNEL_W, STRIDE_W, DILATE_W, LAST_W, FOLD_TAPS != 0};

// The pixel rows and columns that a folded channel adds: its stride remainder plus its tap's steps.
__host__ __device__ constexpr int folded_down(int folded) {
    return folded / kFoldedTaps / kFoldW;
}
__host__ __device__ constexpr int folded_across(int folded) {
    return folded / kFoldedTaps % kFoldW + folded % kFoldedTaps * kFoldW;
}

// Pairs of a job and a phase, one for each stride remainder; forward skips remainders without taps.
__host__ __device__ constexpr int count_pairs() {
    int count = 0;
    for (int a = 0; a < STRIDE_H / kFoldH; a++) {
        for (int b = 0; b < STRIDE_W / kFoldW; b++) {
            count += BACKWARD || kDown.count(a) * kAcross.count(b) > 0;
        }
    }
    return count;
}

__host__ __device__ constexpr int count_taps() {
    int count = 0;
    for (int a = 0; a < STRIDE_H / kFoldH; a++) {
        for (int b = 0; b < STRIDE_W / kFoldW; b++) count += kDown.count(a) * kAcross.count(b);
    }
    return count;
}

constexpr int kPairs = count_pairs(), kAllTaps = count_taps();
constexpr int kJobs = BACKWARD ? kPairs : 1, kPhases = BACKWARD ? 1 : kPairs;

// Each pair's remainders and first tap; each tap's grid row and column.
struct Tables {
    int first_taps[kPairs + 1] = {};
    short remainders_h[kPairs] = {}, remainders_w[kPairs] = {};
    short taps_h[kAllTaps] = {}, taps_w[kAllTaps] = {};

    constexpr Tables() {
        int pair = 0, tap = 0;
        for (int a = 0; a < STRIDE_H / kFoldH; a++) {
            for (int b = 0; b < STRIDE_W / kFoldW; b++) {
                if (!BACKWARD && kDown.count(a) * kAcross.count(b) == 0) continue;
                remainders_h[pair] = a, remainders_w[pair] = b;
                for (int i = 0; i < kDown.count(a) * kAcross.count(b); i++, tap++) {
                    taps_h[tap] = kDown.place(a, i / kAcross.count(b));
                    taps_w[tap] = kAcross.place(b, i % kAcross.count(b));
                }
                first_taps[++pair] = tap;
            }
        }
    }
};

__constant__ Tables tables = Tables();

__device__ __forceinline__ float load(const float *from) { return __ldg(from); }
__device__ __forceinline__ float load(const __half *from) { return __half2float(__ldg(from)); }
