// Shared by the kernels for groups of one or few channels: the layer's shape, the pixels that a
// thread's outputs read, and copies between global and shared memory.
//
// In NCHW, whole rows of one plane, or several whole planes, are one contiguous run of memory. A
// block copies a run to shared memory in 16-byte vectors, and keeps its misalignment, so a run may
// start at any float. Neighbouring threads then take neighbouring columns, each with several rows:
// a row of pixels that several outputs need is read once and stays in registers.
#pragma once

#include "layer.cuh"
#include "output.cuh"

#ifndef GROUPS
#define GROUPS 8
#endif
// A group's input planes and output planes.
#ifndef GROUP_IN
#define GROUP_IN 1
#define GROUP_OUT 1
#endif
#ifndef HELD
#define HELD GROUP_IN  // planes of a group that are in shared memory at once
#endif

// A thread has ROWS rows of all of a group's outputs. A block has STRIPS times as many rows of one
// group, or the whole planes of PLANES groups.
#ifndef ROWS
#define ROWS 4
#define STRIPS 7
#define PLANES 1
#endif
#ifndef THREADS
#define THREADS 224
#endif

#ifndef BACKWARD
#define BACKWARD 0  // 1: outputs are pixels of dx, and inputs are dy; 0: outputs are y
#endif

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

__host__ __device__ constexpr int larger(int a, int b) { return a < b ? b : a; }

// The input positions along an axis that the taps read for output `r` of a few neighbouring ones,
// relative to `begin` of the first one. Backward, that first output is a multiple of the stride.
template <int KERNEL, int STRIDE, int PAD, int DILATE>
struct Axis {
    __host__ __device__ static constexpr int begin(int first) {
        return BACKWARD ? first / STRIDE : first * STRIDE;
    }

    __host__ __device__ static constexpr bool reads(int r, int tap) {
        return !BACKWARD || (r + PAD - tap * DILATE) % STRIDE == 0;
    }

    __host__ __device__ static constexpr int offset(int r, int tap) {
        return BACKWARD ? (r + PAD - tap * DILATE) / STRIDE : r * STRIDE - PAD + tap * DILATE;
    }

    // The tap through which output `r` reads the position at this offset, or -1.
    __host__ __device__ static constexpr int tap(int r, int offset) {
        const int at = BACKWARD ? r + PAD - offset * STRIDE : offset + PAD - r * STRIDE;
        return at >= 0 && at % DILATE == 0 && at / DILATE < KERNEL ? at / DILATE : -1;
    }

    // Bounds of the offsets of `count` outputs.
    __host__ __device__ static constexpr int least() {
        const int first = PAD - (KERNEL - 1) * DILATE;
        return !BACKWARD ? -PAD : first > 0 ? divide_up(first, STRIDE) : first / STRIDE;
    }
    __host__ __device__ static constexpr int most(int count) {
        return BACKWARD ? (count - 1 + PAD) / STRIDE : offset(count - 1, KERNEL - 1);
    }
};

constexpr int kConvolvedH = (HEIGHT + 2 * PAD_H - DILATE_H * (KERNEL_H - 1) - 1) / STRIDE_H + 1;
constexpr int kConvolvedW = (WIDTH + 2 * PAD_W - DILATE_W * (KERNEL_W - 1) - 1) / STRIDE_W + 1;
constexpr int kInH = BACKWARD ? kConvolvedH : HEIGHT, kInW = BACKWARD ? kConvolvedW : WIDTH;
constexpr int kOutH = BACKWARD ? HEIGHT : kConvolvedH, kOutW = BACKWARD ? WIDTH : kConvolvedW;
using Down = Axis<KERNEL_H, STRIDE_H, PAD_H, DILATE_H>;
using Across = Axis<KERNEL_W, STRIDE_W, PAD_W, DILATE_W>;
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr unsigned kInPlane = kInH * kInW, kOutPlane = kOutH * kOutW;

// Backward with a stride, neighbouring outputs of a row read through different taps. A thread has
// one column of each case, so that all threads run the same code.
constexpr int kColumns = BACKWARD ? STRIDE_W : 1;
constexpr int kUnits = divide_up(kOutW, kColumns);  // threads along a row
constexpr int kPlaneItems = STRIPS * kUnits, kItems = PLANES * kPlaneItems;
constexpr int kLeast = Down::least(), kMost = Down::most(ROWS);
constexpr int kBandRows = STRIPS * ROWS, kBands = divide_up(kOutH, kBandRows);
constexpr bool kEven = kOutH % kBandRows == 0 && kOutW % kColumns == 0;  // no item is partial
constexpr int kReach = Down::begin((STRIPS - 1) * ROWS) + kMost - kLeast + 1;
// A block's whole planes are one run; bands of a group's planes are one run each.
constexpr int kInRuns = kBands == 1 ? 1 : HELD, kInOfRun = HELD / kInRuns;
constexpr int kOutRuns = kBands == 1 ? 1 : GROUP_OUT, kOutOfRun = GROUP_OUT / kOutRuns;
// The maximum number of floats of a run, of both arrays.
constexpr int kInFloats = PLANES * kInOfRun * (kBands == 1 ? kInH : smaller(kInH, kReach)) * kInW;
constexpr int kOutFloats = PLANES * kOutOfRun * smaller(kOutH, kBandRows) * kOutW;

// The reach of windows beyond a row's ends, and whether they stay within the rows.
constexpr int kLastUnit = Across::begin((kUnits - 1) * kColumns);
constexpr int kLeft = larger(0, -Across::least());
constexpr int kRight = larger(0, kLastUnit + Across::most(kColumns) - (kInW - 1));
constexpr int kLastStrip = Down::begin(kBands * kBandRows - ROWS);
constexpr bool kWithinRows = kLeast >= 0 && kLastStrip + kMost < kInH;
// A row of zeros, with its margins, comes before the rows that a block reads.
constexpr int kZeros = divide_up(kLeft + (kWithinRows ? 0 : kInW + kRight), 4) * 4;

static_assert(PLANES == 1 || (kBands == 1 && kItems <= THREADS), "several planes are whole ones");
static_assert(THREADS % 32 == 0, "whole warps");
static_assert(GROUP_IN % HELD == 0 && (HELD == GROUP_IN || (PLANES == 1 && kItems <= THREADS)),
              "sums of some of a group's planes stay in registers");
static_assert(!BACKWARD || ROWS % STRIDE_H == 0, "a thread begins at a multiple of the stride");

// The vectors that hold `floats` floats at any misalignment.
__host__ __device__ constexpr int vectors_for(int floats) { return divide_up(floats + 3, 4); }

// The distance in elements of an address from that of a vector of four.
template <class T>
__device__ __forceinline__ int misalignment(const T *at) {
    return int(reinterpret_cast<size_t>(at) / sizeof(T) % 4);
}

// Vector i of an array.
__device__ __forceinline__ float4 four(const float *from, int i) {
    return __ldg(reinterpret_cast<const float4 *>(from) + i);
}

#ifdef HALF
__device__ __forceinline__ float4 four(const __half *from, int i) {
    const uint2 found = __ldg(reinterpret_cast<const uint2 *>(from) + i);
    float of[4];
    read_pair(of, found.x), read_pair(of + 2, found.y);
    return make_float4(of[0], of[1], of[2], of[3]);
}
#endif

// The address in shared memory of a run's first element.
template <class T>
__device__ __forceinline__ float *placed(float4 *space, const T *run) {
    return reinterpret_cast<float *>(space) + misalignment(run);
}

// The split of a run: whole vectors, and up to three floats at each end.
struct Run {
    int count, head, body;

    __device__ Run() {}

    template <class T>
    __device__ Run(const T *at, int floats) {
        count = max(floats, 0);
        head = min((4 - misalignment(at)) & 3, count);
        body = (count - head) / 4;
    }

    __device__ bool has_vector(int i) const { return threadIdx.x + i * THREADS < body; }

    // This thread's float at one of the ends, if it has one.
    __device__ int end() const { return threadIdx.x < head ? threadIdx.x : threadIdx.x + 4 * body; }
};

// The rows of a plane that a band's outputs read; for a whole plane, all rows.
struct Band {
    int row, first, end;  // the first output row; the range of input rows

    __device__ explicit Band(int number) {
        row = number * kBandRows;
        const int begin = Down::begin(row) + kLeast;
        first = kBands == 1 ? 0 : min(max(begin, 0), kInH);
        end = kBands == 1 ? kInH : min(max(begin + kReach, first), kInH);
    }

    // The input floats of a run of `groups` groups.
    __device__ int in_floats(int groups) const {
        return groups * kInOfRun * (end - first) * kInW;
    }

    __device__ int out_floats(int groups) const {
        return groups * kOutOfRun * min(kOutH - row, kBandRows) * kOutW;
    }
};

// A run in flight to shared memory. All loads come before the first store, with other work between.
template <int MOST>
struct Copy {
    // Not 0, also where no run is copied (PLANES 0): NVRTC takes no empty arrays.
    static constexpr int kEach = divide_up(MOST > 0 ? divide_up(MOST, 4) : 1, THREADS);
    Run run;
    float4 vectors[kEach];
    float end;
    int shift;

    template <class T>
    __device__ __forceinline__ void load(const T *from, int floats) {
        run = Run(from, floats);
        shift = misalignment(from);
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            if (run.has_vector(i)) vectors[i] = four(from + run.head, threadIdx.x + i * THREADS);
        }
        if (run.end() < run.count) end = float(__ldg(from + run.end()));
    }

    __device__ __forceinline__ void store(float4 *space) const {
        float *to = reinterpret_cast<float *>(space) + shift;
        float4 *whole = reinterpret_cast<float4 *>(to + run.head);
#pragma unroll
        for (int i = 0; i < kEach; i++) {
            if (run.has_vector(i)) whole[threadIdx.x + i * THREADS] = vectors[i];
        }
        if (run.end() < run.count) to[run.end()] = end;
    }
};

// A thread's outputs within a block.
struct Item {
    int group, row, column;  // within the block; within the plane

    // Explicit zeros: the compiler cannot derive them, and so which rows are never padding.
    __device__ Item(unsigned number, const Band &band) {
        group = PLANES == 1 ? 0 : number / kPlaneItems;
        row = STRIPS == 1 ? band.row : band.row + number / kUnits % STRIPS * ROWS;
        column = number % kUnits * kColumns;
    }
};

// Shared memory for the rows that a block reads. Threads also read around them without a branch,
// and replace those numbers by zeros, so the memory around must exist and have no other writer.
struct Tile {
    float4 space[kZeros / 4 + vectors_for(kInFloats + kRight)];

    __device__ __forceinline__ void store(const Copy<kInFloats> &copy) {
        copy.store(space + kZeros / 4);
        float *floats = reinterpret_cast<float *>(space);
        const int begin = kZeros + copy.shift, end = begin + copy.run.count;
        for (int i = threadIdx.x; i < begin; i += THREADS) floats[i] = 0;
        for (int i = threadIdx.x; i < kRight; i += THREADS) floats[end + i] = 0;
    }

    __device__ __forceinline__ const float *floats() const {
        return reinterpret_cast<const float *>(space);
    }
};

// A thread's window in one plane of a run, from `begin` of its first row and column.
struct Window {
    const float *pixels, *zeros;
    int row, column;

    __device__ Window(const Tile &tile, int shift, const Band &band, const Item &item, int plane)
        : row(Down::begin(item.row)), column(Across::begin(item.column)) {
        const int rows = (item.group * kInOfRun + plane) * kInH + row - band.first;
        pixels = tile.floats() + (kZeros + shift + rows * kInW + column);
        zeros = tile.floats() + (kLeft + column);
    }

    // Reads the pixels of window row `h`, with zeros outside the plane.
    __device__ __forceinline__ void read(float (&found)[kColumns][KERNEL_W], int h) const {
        const bool inside = kWithinRows || unsigned(row + h) < kInH;
        const float *from = inside ? pixels + h * kInW : zeros;
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
#pragma unroll
            for (int q = 0; q < KERNEL_W; q++) {
                if (!Across::reads(c, q)) continue;
                const int offset = Across::offset(c, q);
                const bool always = offset >= 0 && kLastUnit + offset < kInW;
                const float pixel = from[offset];
                found[c][q] = always || unsigned(column + offset) < kInW ? pixel : 0;
            }
        }
    }
};
