// The gradient for w in float32 arithmetic without tensor cores, where all images together have few
// pixels. Sums have at most a few hundred products, so memory latency would dominate.
//
// The product is filters by channels and taps, summed over the positions of dy. A block copies
// DEPTH positions of its tile's filters and windows to shared memory at once, and waits for memory
// once. Its warps divide the tile's filters and the positions: each takes four of every 4 * SHARES
// positions. Their sums are added up at the end, in a fixed order.
//
// Measured: no, it is not on the ladder.
#include <cuda_pipeline.h>

#include "output.cuh"
#include "shape.cuh"
#include "weight_sum.cuh"

// Tiling: warps that divide the filters; warps that divide the positions; a thread's filters and
// windows; positions at once, a multiple of 4; blocks of a multiprocessor.
#ifndef ROW_WARPS
#define ROW_WARPS 1
#define SHARES 4
#define ROWS 8
#define COLUMNS 8
#define DEPTH 64
#define BLOCKS 2
#endif

constexpr int kWarps = ROW_WARPS * SHARES, kThreads = 32 * kWarps;
// A warp is 4 lanes along filters by 8 along windows.
constexpr int kTileRows = ROW_WARPS * 4 * ROWS, kTileColumns = 8 * COLUMNS;
constexpr int kColumns = CHANNELS * kTaps;
// This pitch puts the float4 reads of 8 neighbouring lines into different banks.
constexpr int kPitch = DEPTH % 8 == 4 ? DEPTH : DEPTH + 4;
static_assert(SHARES > 1 || ROWS * COLUMNS <= 64, "a bit for each sum");
constexpr bool kPlain = kTaps == 1 && STRIDE_H * STRIDE_W == 1 && PAD_H + PAD_W == 0;

struct Numbers {
    float rows[kTileRows][kPitch];
    float columns[kTileColumns][kPitch];
};

union Shared {
    Numbers numbers;
    float sums[SHARES][kTileRows][kTileColumns + 8];  // the pitch puts rows 8 banks apart
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// Starts to copy COUNT floats, or writes zeros.
template <int COUNT>
__device__ __forceinline__ void begin_copy(float *to, const float *from, bool there) {
    __pipeline_memcpy_async(to, from, 4 * COUNT, there ? 0 : 4 * COUNT);
}

// Copies planes of dy, or of x for 1x1 kernels: planes `first` and later of the `count` planes of
// each image, COUNT floats at a time.
template <int COUNT, int LINES>
__device__ __forceinline__ void copy_planes(float (&to)[LINES][kPitch], const float *array,
                                            int count, int first, unsigned begin, unsigned end) {
    for (int k = threadIdx.x % 32 * COUNT; k < DEPTH; k += 32 * COUNT) {
        const unsigned at = begin + k;
        const float *from = array + size_t(at / kOutPlane) * count * kOutPlane + at % kOutPlane;
#pragma unroll 4
        for (int line = threadIdx.x / 32; line < LINES; line += kWarps) {
            const bool there = at < end && first + line < count;
            const float *own = there ? from + (first + line) * kOutPlane : array;
            begin_copy<COUNT>(&to[line][k], own, there);
        }
    }
}

// Copies windows: a line is one channel and tap at all positions; a lane has every 32nd position.
__device__ __forceinline__ void copy_windows(float (&to)[kTileColumns][kPitch], const float *x,
                                             int first, unsigned begin, unsigned end) {
    constexpr int kTurns = divide_up(DEPTH, 32);
    const int lane = threadIdx.x % 32;
    int rows[kTurns], across[kTurns], from[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; i++) {
        const unsigned at = begin + lane + 32 * i, inside = at % kOutPlane;
        // Positions beyond `end` get a row below the image, and so zeros.
        rows[i] = at < end ? int(inside / kOutW * STRIDE_H) - PAD_H : HEIGHT + PAD_H;
        across[i] = int(inside % kOutW * STRIDE_W) - PAD_W;
        from[i] = at / kOutPlane * int(kImage) + rows[i] * WIDTH + across[i];
    }
    for (int line = threadIdx.x / 32; line < kTileColumns; line += kWarps) {
        const int channel = (first + line) / kTaps, tap = (first + line) % kTaps;
        const int down = tap / KERNEL_W * DILATE_H, right = tap % KERNEL_W * DILATE_W;
        const int offset = channel * int(kPlane) + down * WIDTH + right;
#pragma unroll
        for (int i = 0; i < kTurns; i++) {
            if (lane + 32 * i >= DEPTH) continue;
            const bool there = first + line < kColumns && unsigned(rows[i] + down) < HEIGHT &&
                               unsigned(across[i] + right) < WIDTH;
            begin_copy<1>(&to[line][lane + 32 * i], x + (there ? from[i] + offset : 0), there);
        }
    }
}

__device__ __forceinline__ void copy(Numbers &numbers, const float *x, const float *dy, int filter,
                                     int column, unsigned begin, unsigned end) {
    constexpr int kAtOnce = kOutPlane % 4 == 0 ? 4 : 1;
    const bool aligned = (size_t(x) | size_t(dy)) % 16 == 0;
    if (kAtOnce == 4 && aligned) {
        copy_planes<kAtOnce>(numbers.rows, dy, FILTERS, filter, begin, end);
    } else {
        copy_planes<1>(numbers.rows, dy, FILTERS, filter, begin, end);
    }
    if (!kPlain) {
        copy_windows(numbers.columns, x, column, begin, end);
    } else if (kAtOnce == 4 && aligned) {
        copy_planes<kAtOnce>(numbers.columns, x, CHANNELS, column, begin, end);
    } else {
        copy_planes<1>(numbers.columns, x, CHANNELS, column, begin, end);
    }
}

// A thread has filters `row` + 4 * i and windows `column` + 8 * j.
struct Worker {
    int slice, row, column;
    float sums[ROWS][COLUMNS] = {};

    __device__ Worker() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        slice = warp % SHARES;
        row = warp / SHARES * 4 * ROWS + lane / 8, column = lane % 8;
    }

    __device__ __forceinline__ void multiply(const Numbers &numbers) {
#pragma unroll 2
        for (int k = slice * 4; k < DEPTH; k += SHARES * 4) {
            float4 columns[COLUMNS];
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                columns[j] = *(const float4 *)&numbers.columns[column + 8 * j][k];
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float4 gradients = *(const float4 *)&numbers.rows[row + 4 * i][k];
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sums[i][j] += gradients.x * columns[j].x;
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sums[i][j] += gradients.y * columns[j].y;
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sums[i][j] += gradients.z * columns[j].z;
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sums[i][j] += gradients.w * columns[j].w;
            }
        }
    }

    // The tile's row and column of sum i.
    __device__ __forceinline__ int down(int i) const { return row + i / COLUMNS * 4; }
    __device__ __forceinline__ int across(int i) const { return column + i % COLUMNS * 8; }
};

// The output tile of a block.
struct Tile {
    float *dw;
    const float *x, *dy;
    int batch, filter, column;

    __device__ __forceinline__ bool has(int down, int across) const {
        return filter + down < FILTERS && column + across < kColumns;
    }

    __device__ __forceinline__ void write(int down, int across, float sum) const {
        store(dw + size_t(filter + down) * kColumns + column + across, sum,
              (const float *)nullptr, 0);
    }

    __device__ __forceinline__ void write_textbook(int down, int across) const {
        write(down, across, weight_sum<float, HEIGHT, WIDTH, kOutH, kOutW>(
                                x + (column + across) / kTaps * kPlane, kImage,
                                dy + (filter + down) * kOutPlane, FILTERS * kOutPlane, batch,
                                (column + across) % kTaps));
    }
};

// Whether a sum is final. With padding, an infinity may have been multiplied by a padding zero.
__device__ __forceinline__ bool stands(float sum) {
    return PAD_H + PAD_W == 0 || isfinite(sum);
}

// Writes the sums of a warp that has all positions.
__device__ __forceinline__ void write_own(const Worker &worker, const Tile &tile) {
    unsigned long long again = 0;  // bit i: sum i is not final
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        const int down = worker.down(i), across = worker.across(i);
        if (!tile.has(down, across)) continue;
        const float sum = worker.sums[i / COLUMNS][i % COLUMNS];
        if (stands(sum)) tile.write(down, across, sum);
        again |= (unsigned long long)!stands(sum) << i;
    }
    for (int i = 0; again; i++, again >>= 1) {
        if (again & 1) tile.write_textbook(worker.down(i), worker.across(i));
    }
}

// Adds up the sums of the warps that divide the positions, and writes them.
__device__ __forceinline__ void write_shared(const Worker &worker, const Tile &tile,
                                             Shared &shared) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        float *to = &shared.sums[worker.slice][worker.down(i)][worker.across(i)];
        *to = worker.sums[i / COLUMNS][i % COLUMNS];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTileRows * kTileColumns; i += kThreads) {
        const int down = i / kTileColumns, across = i % kTileColumns;
        if (!tile.has(down, across)) continue;
        float sum = 0;
#pragma unroll
        for (int slice = 0; slice < SHARES; slice++) sum += shared.sums[slice][down][across];
        if (stands(sum)) {
            tile.write(down, across, sum);
        } else {
            tile.write_textbook(down, across);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    multiply_positions(float *__restrict__ dw, const float *__restrict__ x,
                       const float *__restrict__ dy, int batch) {
    extern __shared__ __align__(16) char bytes[];
    Shared &shared = *(Shared *)bytes;
    const int filter = blockIdx.y * kTileRows, column = blockIdx.x * kTileColumns;
    const unsigned positions = batch * kOutPlane;

    Worker worker;
    for (unsigned begin = 0; begin < positions; begin += DEPTH) {
        if (begin > 0) __syncthreads();
        copy(shared.numbers, x, dy, filter, column, begin, positions);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        worker.multiply(shared.numbers);
    }
    const Tile tile{dw, x, dy, batch, filter, column};
    if constexpr (SHARES == 1) {
        write_own(worker, tile);
    } else {
        write_shared(worker, tile, shared);
    }
}
