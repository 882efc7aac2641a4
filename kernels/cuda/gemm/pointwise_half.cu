// 1x1 convolutions of halves on tensor cores (mma.sync), limited by memory bandwidth: x and y are
// read and written as they are, in NCHW.
//
// A block computes ROWS filters by COLUMNS positions, counted over all images. DEPTH channels at a
// time are copied to shared memory, STAGES - 1 steps ahead; neighbouring positions of a channel
// stay neighbours there, and ldmatrix transposes them. Copies are asynchronous, in vectors of
// VECTOR positions, which always lie in one image; float32 x and arrays that are not aligned are
// loaded by single elements. Sums go through shared memory, so that y is read and written in
// vectors.
//
// Before that, `pack` rounds the weights to fp16, each filter's scaled by a power of two. Sizes are
// arguments: many layers share the code.
#include "mma.cuh"
#include "output.cuh"
#include "split_fp16x2.cuh"

#ifndef ROWS
#define ROWS 128
#define COLUMNS 128
#define DEPTH 32
#define STAGES 4
#endif
#ifndef VECTOR
#define VECTOR 8  // or 4, 2 or 1; divides the pixels of a plane
#endif
#ifndef IN_IMAGE
#define IN_IMAGE size_t(channels) * plane  // input elements between images
#endif
#ifndef OUT_IMAGE
#define OUT_IMAGE size_t(filters) * plane  // output elements between images
#endif

constexpr int kThreads = 256;
// Positions that are copied at once.
constexpr int kInVector = sizeof(X_TYPE) == 2 ? VECTOR : 1;
// Warps along the filters and along the positions; a warp's positions.
constexpr int kWarpsDown = ROWS / 64, kWarpsAcross = 8 / kWarpsDown;
constexpr int kWarpColumns = COLUMNS / kWarpsAcross;
// Pitches that put the 8 rows of a matrix into different banks.
constexpr int kWeightPitch = DEPTH + 8, kPixelPitch = COLUMNS + 8;
static_assert(ROWS % 64 == 0 && DEPTH % 16 == 0 && kWarpColumns % 16 == 0, "whole matrices");

struct Stage {
    __half weights[ROWS][kWeightPitch];
    __half pixels[DEPTH][kPixelPitch];
};

union Shared {
    Stage stages[STAGES];
    float results[ROWS][COLUMNS + 8];
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// The weights as blocks copy them: tiles of ROWS filters by DEPTH channels, which are contiguous.
// After them come the factors that reverse the filters' scales.
struct Packed {
    __half *weights;
    float *factors;
    int slabs, row_tiles;

    __device__ Packed(void *prepared, int channels, int filters) {
        slabs = (channels + DEPTH - 1) / DEPTH, row_tiles = (filters + ROWS - 1) / ROWS;
        weights = (__half *)prepared;
        factors = (float *)(weights + size_t(row_tiles) * slabs * (ROWS * DEPTH));
    }

    __device__ __half *tile(int row_tile, int slab) const {
        return weights + (size_t(row_tile) * slabs + slab) * (ROWS * DEPTH);
    }
};

// One warp packs a row.
extern "C" __global__ void __launch_bounds__(kThreads)
    pack(void *__restrict__ prepared, const float *__restrict__ w, int channels,
         int filters CONVERT_PARAMETERS) {
    const Packed packed(prepared, channels, filters);
    const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *from = w + size_t(row) * channels;
    unsigned most = 0;
    for (int c = lane; row < filters && c < channels; c += 32) most = max(most, magnitude(from[c]));
    most = __reduce_max_sync(0xffffffffu, most);
    const float scale = scale_for(most, &packed.factors[row]);
    for (int c = lane; c < packed.slabs * DEPTH; c += 32) {
        const float v = row < filters && c < channels ? from[c] * scale : 0;
        __half *tile = packed.tile(row / ROWS, c / DEPTH);
        tile[row % ROWS * DEPTH + c % DEPTH] = __float2half_rn(v);
    }
}

// Begins to copy COUNT bytes, or zeros.
template <int COUNT>
__device__ __forceinline__ void copy_ahead(void *to, const void *from, bool there) {
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to);
    if constexpr (COUNT == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                     "r"(there ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from),
                     "n"(COUNT), "r"(there ? COUNT : 0)
                     : "memory");
    }
}

// A thread's part of each stage: V neighbouring positions in every kStep-th channel.
template <int V>
struct Pixels {
    static constexpr int kRuns = COLUMNS / V, kStep = kThreads / kRuns;
    static_assert(DEPTH % kStep == 0, "whole turns");
    const X_TYPE *from;
    int column, first, channels, plane;
    bool there;

    __device__ Pixels(const X_TYPE *x, unsigned begin, unsigned positions, int channels, int plane)
        : column(threadIdx.x % kRuns * V),
          first(threadIdx.x / kRuns),
          channels(channels),
          plane(plane) {
        const unsigned position = begin + column;
        there = position < positions;
        from = x;
        if (there) from += size_t(position / plane) * (IN_IMAGE) + position % plane;
    }

    __device__ __forceinline__ void load(Stage &stage, int slab CONVERT_PARAMETERS) const {
#pragma unroll
        for (int turn = 0; turn < DEPTH / kStep; turn++) {
            const int k = first + turn * kStep, c = slab * DEPTH + k;
            const bool here = there && c < channels;
            const X_TYPE *at = here ? from + size_t(c) * plane : from;
            __half *to = &stage.pixels[k][column];
            if constexpr (V > 1) {
                copy_ahead<2 * V>(to, at, here);
            } else {
                float v = here ? float(__ldg(at)) : 0;
                if (here) CONVERT(v, c);
                *to = __float2half_rn(v);
            }
        }
    }

    // Converts what this thread has copied.
    __device__ __forceinline__ void convert(Stage &stage, int slab CONVERT_PARAMETERS) const {
        if (V == 1) return;
#pragma unroll
        for (int turn = 0; turn < DEPTH / kStep; turn++) {
            const int k = first + turn * kStep, c = slab * DEPTH + k;
            if (c >= channels) break;
            __half *to = &stage.pixels[k][column];
#pragma unroll
            for (int i = 0; i < V; i++) {
                float v = __half2float(to[i]);
                CONVERT(v, c);
                to[i] = __float2half_rn(v);
            }
        }
    }
};

__device__ __forceinline__ void load_weights(Stage &stage, const Packed &packed, int row_tile,
                                             int slab) {
    const __half *from = packed.tile(row_tile, slab);
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += kThreads) {
        copy_ahead<16>(&stage.weights[i / (DEPTH / 8)][i % (DEPTH / 8) * 8], from + 8 * i, true);
    }
}

// A warp's sums: of 16 filters by 8 positions a thread has two in rows lane / 4 and lane / 4 + 8.
using Sums = float[4][kWarpColumns / 8][4];

__device__ __forceinline__ void multiply_stage(Sums &sums, const Stage &stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = warp / kWarpsAcross * 64, column0 = warp % kWarpsAcross * kWarpColumns;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t rows[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const __half *at = &stage.weights[row0 + 16 * i + lane % 16][k + lane / 16 * 8];
            load_records(rows[i], unsigned(__cvta_generic_to_shared(at)) / 16);
        }
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; j += 2) {
            uint32_t columns[4];
            load_transposed(columns, &stage.pixels[k + lane % 16][column0 + 8 * j + lane / 16 * 8]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                multiply(sums[i][j], rows[i], columns[0], columns[1]);
                multiply(sums[i][j + 1], rows[i], columns[2], columns[3]);
            }
        }
    }
}

// Brings a block's sums to shared memory, without the weights' scales and with the bias.
__device__ __forceinline__ void collect(Shared &shared, const Sums &sums, const float *factors,
                                        const float *bias, int filter0, int filters) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = warp / kWarpsAcross * 64 + lane / 4;
    const int column0 = warp % kWarpsAcross * kWarpColumns + lane % 4 * 2;
    float factor[8], addend[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = row0 + 8 * i;
        factor[i] = factors[row];
        addend[i] = BIAS && filter0 + row < filters ? bias[filter0 + row] : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; j++) {
            const float *of_row = sums[i / 2][j] + i % 2 * 2;
            *(float2 *)&shared.results[row0 + 8 * i][column0 + 8 * j] = make_float2(
                of_row[0] * factor[i] + addend[i], of_row[1] * factor[i] + addend[i]);
        }
    }
}

// Reads V neighbouring sums, in an order in which threads do not meet in a bank.
template <int V>
__device__ __forceinline__ void read_sums(float (&sums)[V], const float *from) {
    if constexpr (V == 8) {
        const bool swapped = threadIdx.x / 4 % 2;
        float a[4], b[4];
        read_vector(a, from + (swapped ? 4 : 0));
        read_vector(b, from + (swapped ? 0 : 4));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sums[k] = swapped ? b[k] : a[k];
            sums[4 + k] = swapped ? a[k] : b[k];
        }
    } else {
        read_vector(sums, from);
    }
}

// Writes a block's results, V neighbouring positions at a time. Reads several old values before it
// writes: a read after a write waits for it.
template <int V>
__device__ __forceinline__ void write(const Shared &shared, Y_TYPE *y, int filter0, unsigned begin,
                                      unsigned positions, int filters, int plane) {
    constexpr int kRuns = COLUMNS / V, kStep = kThreads / kRuns, kTurns = ROWS / kStep;
    constexpr int kAtOnce = kTurns < 8 ? kTurns : 8;
    const int column = threadIdx.x % kRuns * V, first = threadIdx.x / kRuns;
    const unsigned position = begin + column;
    if (position >= positions) return;
    y += size_t(position / plane) * (OUT_IMAGE) + position % plane;
    for (int turn = 0; turn < kTurns; turn += kAtOnce) {
        float before[kAtOnce][V];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int filter = filter0 + first + (turn + i) * kStep;
            if (ACCUMULATE && filter < filters) {
                read_vector(before[i], y + size_t(filter) * plane);
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int row = first + (turn + i) * kStep, filter = filter0 + row;
            float sums[V];
            read_sums(sums, &shared.results[row][column]);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float v = sums[k];
                if (ACCUMULATE) v += before[i][k];
                ACTIVATE(v);
                sums[k] = v;
            }
            if (filter < filters) write_vector(y + size_t(filter) * plane, sums);
        }
    }
}

template <int V>
__device__ __forceinline__ void multiply_slabs(Sums &sums, Shared &shared, const X_TYPE *x,
                                               const Packed &packed, int row_tile, unsigned begin,
                                               unsigned positions, int channels,
                                               int plane CONVERT_PARAMETERS) {
    const Pixels<V> pixels(x, begin, positions, channels, plane);
    const auto load = [&](int slab) {
        if (slab < packed.slabs) {
            Stage &stage = shared.stages[slab % STAGES];
            load_weights(stage, packed, row_tile, slab);
            pixels.load(stage, slab CONVERT_ARGUMENTS);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int slab = 0; slab < STAGES - 1; slab++) load(slab);
    for (int slab = 0; slab < packed.slabs; slab++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        Stage &stage = shared.stages[slab % STAGES];
        if (kConverts) pixels.convert(stage, slab CONVERT_ARGUMENTS);
        // All copies of this stage have arrived, and all threads have read the one filled next.
        __syncthreads();
        load(slab + STAGES - 1);
        multiply_stage(sums, stage);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    multiply_pixels(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x,
                    const float *__restrict__ bias, void *__restrict__ prepared, int batch,
                    int channels, int filters, int plane CONVERT_PARAMETERS) {
    extern __shared__ __align__(16) char bytes[];
    Shared &shared = *(Shared *)bytes;
    const Packed packed(prepared, channels, filters);
    const unsigned positions = unsigned(batch) * plane;
    // Neighbouring blocks read the same pixels.
    const int row_tile = blockIdx.x % packed.row_tiles;
    const unsigned begin = blockIdx.x / packed.row_tiles * COLUMNS;
    Sums sums = {};
    if (kInVector > 1 && size_t(x) % (2 * kInVector) == 0) {
        multiply_slabs<kInVector>(sums, shared, x, packed, row_tile, begin, positions, channels,
                                  plane CONVERT_ARGUMENTS);
    } else {
        multiply_slabs<1>(sums, shared, x, packed, row_tile, begin, positions, channels,
                          plane CONVERT_ARGUMENTS);
    }
    const int filter0 = row_tile * ROWS;
    collect(shared, sums, packed.factors + filter0, bias, filter0, filters);
    __syncthreads();
    if (size_t(y) % 16 == 0 || size_t(y) % (VECTOR * sizeof(Y_TYPE)) == 0) {
        write<VECTOR>(shared, y, filter0, begin, positions, filters, plane);
    } else {
        write<1>(shared, y, filter0, begin, positions, filters, plane);
    }
}
