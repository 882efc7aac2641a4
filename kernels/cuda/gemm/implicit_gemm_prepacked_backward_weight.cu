// The gradient for w of implicit_gemm_prepacked.cu, on Hopper's tensor cores.
//
// The product is filters by channels for each tap, summed over the positions of all images in the
// grid of gemm_grid.cuh. dy is in x's grid, with zeros at positions without an output.
//
// 1. `lay_out_planes` packs x and dy into records: 8 channels of a position in fp16, in 2 parts or
//    one (PARTS). Each channel of each image has a power-of-two scale. An image's positions are
//    padded to a multiple of 16. For large planes, `find_largest` finds the magnitudes first.
// 2. `multiply_positions`: 4 threads issue bulk copies of CHUNK positions of dy and x, eight warps
//    multiply them. The taps of a row read the same x at different offsets, and the same dy, which
//    stays in registers. After each chunk, its sums are added up in float32 registers.
// 3. `add_up` adds the sums of all splits of the positions, in a fixed order. Elements that are not
//    finite are recomputed by direct convolution.
//
// Measured: no, it is not on the ladder.
#include "copy_engine.cuh"
#include "gemm_grid.cuh"
#include "weight_sum.cuh"
#include "wgmma.cuh"

// Tiling: channels of four warps (16, 32 or 64); taps of a row at once; whether the two groups of
// four warps have their own filters (2) or alternate on chunks (1); stages in shared memory (of
// each group if they alternate); positions of a chunk; threads that pack 8 channels.
#ifndef COLUMNS
#define COLUMNS 64
#define TAPS 3
#define ROW_GROUPS 1
#define STAGES 2
#define CHUNK 64
#define PLANE_THREADS 512
#endif

constexpr int kChunk = CHUNK, kSteps = CHUNK / 16;
// Positions of an image: those of x, and those of dy up to its last non-zero one.
constexpr int kImage = divide_up(kPositions, 16) * 16;
constexpr int kDyImage = divide_up((VALID_H - 1) * GRID_W + VALID_W, 16) * 16;
constexpr int kChunks = divide_up(kDyImage, kChunk);  // of one image
static_assert(CHUNK % 16 == 0);
constexpr int kRows = 64 * ROW_GROUPS;              // of a tile
// Groups of warps that alternate on chunks have separate stages: a group that saw every second
// phase of a barrier only could mistake one phase for another.
constexpr int kChunkGroups = 2 / ROW_GROUPS, kStages = kChunkGroups * STAGES;
constexpr int kRowTiles = divide_up(kSetRows, kRows), kColumnTiles = divide_up(kDepth, COLUMNS);
constexpr int kRowUnits = kRowTiles * kRows / 8, kColumnUnits = kColumnTiles * COLUMNS / 8;
constexpr int kAllRowUnits = SETS * kRowUnits, kAllColumnUnits = SETS * kPhases * kColumnUnits;
constexpr int kLastTap = kDown.last_place() * GRID_W + kAcross.last_place();
constexpr int kSums = COLUMNS / 2;  // of one thread, for each tap
// Whether a thread has registers left for the scales, beside the sums of all taps, two taps in
// flight, and dy.
constexpr bool kAhead = kSums * (TAPS + 2) + CHUNK / 2 + kSums / 2 <= 200;

// The taps of an item: at most TAPS of one row.
struct TapGroups {
    static constexpr __host__ __device__ int count() {
        int count = 0;
        for (int a = 0; a < STRIDE_H / kFoldH; a++) {
            for (int b = 0; b < STRIDE_W / kFoldW; b++) {
                count += kDown.count(a) * divide_up(kAcross.count(b), TAPS);
            }
        }
        return count;
    }

    // The distance between the first and the last tap of a group.
    static constexpr __host__ __device__ int span() {
        int span = 0;
        for (int b = 0; b < STRIDE_W / kFoldW; b++) {
            for (int i = 0; i < kAcross.count(b); i++) {
                const int distance = kAcross.place(b, i) - kAcross.place(b, i / TAPS * TAPS);
                span = distance > span ? distance : span;
            }
        }
        return span;
    }
};

constexpr int kTapGroups = TapGroups::count();
constexpr int kSpan = kChunk + TapGroups::span();

// Each group's pair, first tap and number of taps.
struct TapTable {
    short pairs[kTapGroups] = {}, first[kTapGroups] = {}, counts[kTapGroups] = {};

    constexpr TapTable() {
        int group = 0, pair = 0, tap = 0;
        for (int a = 0; a < STRIDE_H / kFoldH; a++) {
            for (int b = 0; b < STRIDE_W / kFoldW; b++) {
                const int across = kAcross.count(b);
                if (kDown.count(a) * across == 0) continue;
                for (int i = 0; i < kDown.count(a); i++, tap += across) {
                    for (int j = 0; j < across; j += TAPS, group++) {
                        pairs[group] = pair, first[group] = tap + j;
                        counts[group] = across - j < TAPS ? across - j : TAPS;
                    }
                }
                pair++;
            }
        }
    }
};

__constant__ TapTable tap_groups = TapTable();

// Planes are packed in strips of up to 8 positions of each thread.
constexpr int kTurns = divide_up(kImage, PLANE_THREADS) < 8 ? divide_up(kImage, PLANE_THREADS) : 8;
constexpr int kStrips = divide_up(kImage, PLANE_THREADS * kTurns);
constexpr int kUnits = kAllRowUnits + kAllColumnUnits;

// Global memory shared by the launches: the largest magnitudes of strips, the scales of dy's and
// x's planes, their records, and sums.
struct Workspace {
    unsigned *largest;
    float *dy_factors, *x_factors;
    uint4 *dy, *x;
    float *sums;
    size_t dy_length, x_length;  // positions of a plane, and those read beyond it

    __device__ Workspace(void *memory, int batch) {
        dy_length = size_t(batch) * kDyImage + kChunk;
        x_length = size_t(batch) * kImage + kChunk + kLastTap + TapGroups::span();
        largest = (unsigned *)memory;
        dy_factors = (float *)(largest + size_t(batch) * kUnits * kStrips * 8);
        x_factors = dy_factors + size_t(batch) * kAllRowUnits * 8;
        dy = (uint4 *)(x_factors + size_t(batch) * kAllColumnUnits * 8);
        x = dy + kAllRowUnits * PARTS * dy_length;
        sums = (float *)(x + kAllColumnUnits * PARTS * x_length);
    }
};

// Sums of one split of the positions.
constexpr size_t kPartSums = size_t(SETS) * kRowTiles * kRows * kAllTaps * kColumnTiles * COLUMNS;

// One channel of an image, by position of the grid.
struct DyPlane {
    const ELEMENT *from;

    __device__ DyPlane(const ELEMENT *dy, int image, int unit, int k) {
        const int set = unit / kRowUnits, row = unit % kRowUnits * 8 + k;
        const int filter = set * kSetOut + row;
        from = row < kSetRows ? dy + (size_t(image) * OUT_CHANNELS + filter) * kOutPlane : nullptr;
    }

    __device__ __forceinline__ float at(int row, int column) const {
        return from && row < VALID_H && column < VALID_W ? load(from + row * OUT_W + column) : 0;
    }
};

struct XPlane {
    const ELEMENT *from;
    int row0, column0;

    __device__ XPlane(const ELEMENT *x, int image, int unit, int k) {
        const int plane = unit / kColumnUnits, pair = plane % kPhases, set = plane / kPhases;
        const int number = unit % kColumnUnits * 8 + k, folded = number % kFold;
        const int channel = set * kSetIn + number / kFold;
        from = number < kDepth ? x + (size_t(image) * IN_CHANNELS + channel) * kInPlane : nullptr;
        row0 = IN_FIRST_H + tables.remainders_h[pair] + folded_down(folded);
        column0 = IN_FIRST_W + tables.remainders_w[pair] + folded_across(folded);
    }

    __device__ __forceinline__ float at(int row, int column) const {
        row = row * IN_STEP_H + row0, column = column * IN_STEP_W + column0;
        const bool there = from && unsigned(row) < IN_H && unsigned(column) < IN_W;
        return there ? load(from + row * IN_W + column) : 0;
    }
};

// A thread's positions of a strip of 8 channels of an image.
struct Strip {
    float values[kTurns][8];
    int first;

    template <class Plane>
    __device__ __forceinline__ void read(const ELEMENT *from, int image, int unit, int strip) {
        const Plane planes[8] = {{from, image, unit, 0}, {from, image, unit, 1},
                                 {from, image, unit, 2}, {from, image, unit, 3},
                                 {from, image, unit, 4}, {from, image, unit, 5},
                                 {from, image, unit, 6}, {from, image, unit, 7}};
        first = strip * (PLANE_THREADS * kTurns) + threadIdx.x;
#pragma unroll
        for (int turn = 0; turn < kTurns; turn++) {
            const int position = first + turn * PLANE_THREADS;
            const int row = position / GRID_W, column = position % GRID_W;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                values[turn][k] = position < kPositions ? planes[k].at(row, column) : 0;
            }
        }
    }

    // Reduces the largest magnitudes over the block; every thread gets the result.
    __device__ __forceinline__ void find_largest(unsigned (&most)[8]) const {
        __shared__ unsigned of_block[8];
        if (threadIdx.x < 8) of_block[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++) {
            most[k] = 0;
#pragma unroll
            for (int turn = 0; turn < kTurns; turn++) {
                most[k] = max(most[k], magnitude(values[turn][k]));
            }
            most[k] = __reduce_max_sync(0xffffffffu, most[k]);
            if (threadIdx.x % 32 == k) atomicMax(&of_block[k], most[k]);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; k++) most[k] = of_block[k];
    }

    // Packs a strip, and writes the factors that reverse its scales.
    __device__ __forceinline__ void write(uint4 *to, float *factors, size_t length, int positions,
                                          const unsigned (&most)[8]) const {
        float scales[8], factor;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            scales[k] = scale_for(most[k], &factor);
            if (first == 0) factors[k] = factor;
        }
#pragma unroll
        for (int turn = 0; turn < kTurns; turn++) {
            const int position = first + turn * PLANE_THREADS;
            if (position >= positions) break;
            float scaled[8];
#pragma unroll
            for (int k = 0; k < 8; k++) scaled[k] = values[turn][k] * scales[k];
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                to[part * length + position] = record(scaled, 1, part);
            }
        }
    }
};

// The strip of a block: dy's units come before x's.
struct Place {
    int image, unit, strip;
    bool of_dy;

    __device__ Place() {
        unsigned number = blockIdx.x;
        strip = number % kStrips, number /= kStrips;
        unit = number % kUnits, image = number / kUnits;
        of_dy = unit < kAllRowUnits;
    }

    __device__ __forceinline__ void read(Strip &values, const ELEMENT *x, const ELEMENT *dy) const {
        if (of_dy) {
            values.read<DyPlane>(dy, image, unit, strip);
        } else {
            values.read<XPlane>(x, image, unit - kAllRowUnits, strip);
        }
    }

    __device__ __forceinline__ unsigned *largest(const Workspace &work) const {
        return work.largest + (size_t(image) * kUnits + unit) * kStrips * 8;
    }
};

extern "C" __global__ void __launch_bounds__(PLANE_THREADS)
    find_largest(void *__restrict__ memory, const ELEMENT *__restrict__ x,
                 const ELEMENT *__restrict__ dy, int batch) {
    const Workspace work(memory, batch);
    const Place place;
    Strip values;
    place.read(values, x, dy);
    unsigned most[8];
    values.find_largest(most);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (threadIdx.x == k) place.largest(work)[place.strip * 8 + k] = most[k];
    }
}

extern "C" __global__ void __launch_bounds__(PLANE_THREADS, kTurns <= 2 ? 1536 / PLANE_THREADS : 1)
    lay_out_planes(void *__restrict__ memory, const ELEMENT *__restrict__ x,
                   const ELEMENT *__restrict__ dy, int batch) {
    const Workspace work(memory, batch);
    const Place place;
    Strip values;
    place.read(values, x, dy);
    unsigned most[8] = {};
    if (kStrips == 1) {
        values.find_largest(most);
    } else {
        for (int i = 0; i < kStrips * 8; i += 8) {
#pragma unroll
            for (int k = 0; k < 8; k++) most[k] = max(most[k], place.largest(work)[i + k]);
        }
    }
    const int unit = place.of_dy ? place.unit : place.unit - kAllRowUnits;
    const size_t length = place.of_dy ? work.dy_length : work.x_length;
    uint4 *to = (place.of_dy ? work.dy : work.x) + size_t(unit) * PARTS * length;
    float *factors = place.of_dy ? work.dy_factors + size_t(place.image) * kAllRowUnits * 8
                                 : work.x_factors + size_t(place.image) * kAllColumnUnits * 8;
    const int positions = place.of_dy ? kDyImage : kImage;
    values.write(to + size_t(place.image) * positions, factors + unit * 8, length, positions, most);
    if (!place.of_dy && place.image == batch - 1 && place.strip == 0) {  // zeros behind it
        uint4 *end = to + size_t(batch) * kImage;
        for (int i = threadIdx.x; i < length - size_t(batch) * kImage; i += PLANE_THREADS) {
            for (int part = 0; part < PARTS; part++) {
                end[part * length + i] = make_uint4(0, 0, 0, 0);
            }
        }
    }
}

struct Shared {
    uint4 dy[kStages][PARTS][kRows / 8][kChunk];
    uint4 x[kStages][PARTS][COLUMNS / 8][kSpan];
    float dy_factors[kStages][kRows], x_factors[kStages][COLUMNS];
    Barrier full[kStages], free[kStages];
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// The work of a block at one time: a tile, a group of taps, and a split of the chunks.
struct Item {
    int row_tile, column_tile, set, group, split;
    unsigned begin, end;

    __device__ Item(unsigned number, int batch, int splits) {
        row_tile = number % kRowTiles, number /= kRowTiles;
        column_tile = number % kColumnTiles, number /= kColumnTiles;
        group = number % kTapGroups, number /= kTapGroups;
        set = number % SETS, split = number / SETS;
        const unsigned long long chunks = (unsigned long long)batch * kChunks;
        begin = split * chunks / splits, end = (split + 1) * chunks / splits;
    }

    static __device__ unsigned count(int splits) {
        return kRowTiles * kColumnTiles * kTapGroups * SETS * splits;
    }

    __device__ int pair() const { return tap_groups.pairs[group]; }
    __device__ int row_unit() const { return set * kRowUnits + row_tile * (kRows / 8); }
    __device__ int column_unit() const {
        return (set * kPhases + pair()) * kColumnUnits + column_tile * (COLUMNS / 8);
    }
};

// Four threads issue the bulk copies; they divide each chunk's runs (8 channels of a chunk). One
// thread would issue copies more slowly than the tensor cores multiply.
constexpr int kCopyThreads = 4 / kChunkGroups;  // of one group of warps
static_assert(kCopyThreads % PARTS == 0);

// Copies a thread's runs of LENGTH positions. In global memory, runs are ordered by unit; in shared
// memory, by part.
template <int RUNS, int LENGTH>
__device__ __forceinline__ void copy_runs(void *stage, const uint4 *from, size_t length,
                                           int copy_thread, Barrier *full) {
    constexpr int kUnits = RUNS / PARTS;
    uint4 *to = (uint4 *)stage + (copy_thread % PARTS * kUnits + copy_thread / PARTS) * LENGTH;
    from += copy_thread * length;
#pragma unroll 1  // these threads have few registers
    for (int run = copy_thread; run < RUNS; run += kCopyThreads) {
        copy_in((float *)to, (const float *)from, LENGTH * 16, full);
        to += kCopyThreads / PARTS * LENGTH, from += kCopyThreads * length;
    }
}

__device__ __forceinline__ void issue_copies(Shared &shared, const Workspace &work, int batch,
                                             int splits, int chunk_group, int copy_thread) {
    constexpr int kRowRuns = PARTS * (kRows / 8), kColumnRuns = PARTS * (COLUMNS / 8);
    constexpr int kBytes = (kRowRuns * kChunk + kColumnRuns * kSpan) * 16 + (kRows + COLUMNS) * 4;
    Ring<STAGES> ring;
    for (unsigned number = blockIdx.x; number < Item::count(splits); number += gridDim.x) {
        const Item item(number, batch, splits);
        const int tap = tap_groups.first[item.group];
        const int shift = tables.taps_h[tap] * GRID_W + tables.taps_w[tap];
        const uint4 *dy = work.dy + item.row_unit() * PARTS * work.dy_length;
        const uint4 *x = work.x + item.column_unit() * PARTS * work.x_length + shift;
        for (unsigned chunk = item.begin + chunk_group; chunk < item.end;
             chunk += kChunkGroups, ring.advance()) {
            const size_t image = chunk / kChunks;
            const int inside = chunk % kChunks * kChunk, stage = chunk_group * STAGES + ring.number;
            Barrier *full = &shared.full[stage];
            barrier_wait(&shared.free[stage], ring.parity ^ 1);
            if (copy_thread == 0) barrier_expect(full, kBytes);
            if (copy_thread == kCopyThreads / 2) {
                const float *from = work.dy_factors + (image * kAllRowUnits + item.row_unit()) * 8;
                copy_in(shared.dy_factors[stage], from, kRows * 4, full);
            }
            if (copy_thread == kCopyThreads - 1) {
                const float *from =
                    work.x_factors + (image * kAllColumnUnits + item.column_unit()) * 8;
                copy_in(shared.x_factors[stage], from, COLUMNS * 4, full);
            }
            copy_runs<kRowRuns, kChunk>(shared.dy[stage], dy + image * kDyImage + inside,
                                         work.dy_length, copy_thread, full);
            copy_runs<kColumnRuns, kSpan>(shared.x[stage], x + image * kImage + inside,
                                           work.x_length, copy_thread, full);
        }
    }
}

// The tile of one group of four warps: 64 filters by COLUMNS channels, for each tap of the item.
struct Worker {
    Shared &shared;
    const Workspace &work;
    int group;
    Ring<STAGES> ring;  // of the group of warps
    float total[TAPS][kSums];

    __device__ __forceinline__ int chunk_group() const { return kChunkGroups == 2 ? group : 0; }
    __device__ __forceinline__ int stage() const { return chunk_group() * STAGES + ring.number; }

    __device__ __forceinline__ int row() const {  // and row() + 8, of the tile
        return (ROW_GROUPS == 2 ? group * 64 : 0) + threadIdx.x / 32 % 4 * 16 +
               threadIdx.x % 32 / 4;
    }

    // Multiplies a chunk. Its steps from `steps` on belong to the next image, and count as zeros.
    __device__ __forceinline__ void multiply_chunk(const Item &item, int steps) {
        barrier_wait(&shared.full[stage()], ring.parity);
        const int first = tap_groups.first[item.group], count = tap_groups.counts[item.group];
        uint32_t a[PARTS][kSteps][4];
        const int unit = (ROW_GROUPS == 2 ? group * 8 : 0) + threadIdx.x / 32 % 4 * 2;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint4 *rows = shared.dy[stage()][part][unit] + load_rows_at(kChunk);
#pragma unroll
            for (int step = 0; step < kSteps; step++) {
                load_rows(a[part][step], rows + 16 * step);
#pragma unroll
                for (int i = 0; i < 4; i++) a[part][step][i] *= step < steps;
            }
        }
        const uint64_t b = describe_by_rows(shared.x[stage()][0][0], kSpan);
        multiply_taps<TAPS>(a, b, first, count);
        __syncwarp();  // all lanes have read their scales
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.free[stage()]);
    }

    // `taps` taps, or `count` if that is less. While the tensor cores multiply one tap, the
    // previous tap's sums are added up. A constant number of taps keeps the compiler from waiting
    // after each.
    template <int taps>
    __device__ __forceinline__ void multiply_taps(const uint32_t (&a)[PARTS][kSteps][4], uint64_t b,
                                                  int first, int count) {
        if constexpr (taps > 1) {
            if (count < taps) {
                multiply_taps<taps - 1>(a, b, first, count);
                return;
            }
        }
        float parts[2][kSums];
        begin_tap(parts[0], a, b);
#pragma unroll
        for (int tap = 1; tap < taps; tap++) {
            const int shift = tables.taps_w[first + tap] - tables.taps_w[first];
            begin_tap(parts[tap % 2], a, b + shift);
            end_tap<1>(total[tap - 1], parts[(tap + 1) % 2]);
        }
        end_tap<0>(total[taps - 1], parts[(taps + 1) % 2]);
    }

    __device__ __forceinline__ void begin_tap(float (&part)[kSums],
                                              const uint32_t (&a)[PARTS][kSteps][4],
                                              uint64_t columns) {
        hold(part);
        begin_multiplying();
        // Products with second parts come first: wgmma.cuh explains why.
        if constexpr (PARTS == 2) {
#pragma unroll
            for (int step = 0; step < kSteps; step++) {
                multiply(part, a[1][step], columns + 16 * step, step > 0);
                multiply(part, a[0][step], columns + 16 * step + COLUMNS / 8 * kSpan, 1);
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            multiply(part, a[0][step], columns + 16 * step, PARTS == 2 || step > 0);
        }
        multiplying_begun();
    }

    static __device__ __forceinline__ void read_columns(float2 (&columns)[kSums / 4],
                                                        const float *from) {
#pragma unroll
        for (int i = 0; i < kSums / 4; i++) columns[i] = *(const float2 *)(from + i * 8);
    }

    // With kAhead, scales are read while the tensor cores multiply.
    template <int newer>
    __device__ __forceinline__ void end_tap(float (&sums)[kSums], float (&part)[kSums]) const {
        const float *of_rows = shared.dy_factors[stage()] + row();
        const float *of_columns = shared.x_factors[stage()] + threadIdx.x % 4 * 2;
        const float rows[2] = {of_rows[0], of_rows[8]};
        float2 columns[kSums / 4];
        if (kAhead) read_columns(columns, of_columns);
        multiplied<newer>();
        hold(part);
        if (!kAhead) read_columns(columns, of_columns);
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
            const float2 two = columns[i / 4];
            sums[i] += part[i] * rows[0] * two.x;
            sums[i + 1] += part[i + 1] * rows[0] * two.y;
            sums[i + 2] += part[i + 2] * rows[1] * two.x;
            sums[i + 3] += part[i + 3] * rows[1] * two.y;
        }
    }

    __device__ __forceinline__ void multiply_item(const Item &item) {
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
#pragma unroll
            for (int i = 0; i < kSums; i++) total[tap][i] = 0;
        }
        for (unsigned chunk = item.begin + chunk_group(); chunk < item.end;
             chunk += kChunkGroups, ring.advance()) {
            const int left = kDyImage - chunk % kChunks * kChunk;
            multiply_chunk(item, min(left, kChunk) / 16);
        }
    }

    __device__ __forceinline__ void keep(const Item &item) const {
        const int part = ROW_GROUPS == 2 ? item.split : item.split * 2 + group;
        const int first = tap_groups.first[item.group], count = tap_groups.counts[item.group];
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
            if (tap >= count) break;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const size_t of_row = item.row_unit() * 8 + row() + 8 * half;
                float *to = work.sums + part * kPartSums +
                            (of_row * kAllTaps + first + tap) * (kColumnTiles * COLUMNS) +
                            item.column_tile * COLUMNS + threadIdx.x % 4 * 2;
#pragma unroll
                for (int i = 0; i < kSums; i += 4) {
                    *(float2 *)(to + i * 2) =
                        make_float2(total[tap][i + 2 * half], total[tap][i + 2 * half + 1]);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    multiply_positions(void *__restrict__ memory, int batch, int splits) {
    extern __shared__ __align__(128) char bytes[];
    Shared &shared = *(Shared *)bytes;
    const Workspace work(memory, batch);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; i++) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.free[i], 8 / kChunkGroups);
        }
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
        if (elected()) {
            issue_copies(shared, work, batch, splits, warp / kCopyThreads, warp % kCopyThreads);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        Worker worker{shared, work, __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0) - 1};
        for (unsigned number = blockIdx.x; number < Item::count(splits); number += gridDim.x) {
            const Item item(number, batch, splits);
            worker.multiply_item(item);
            worker.keep(item);
        }
    }
}

constexpr int kAdded = kTaps <= 128 ? 64 : 8;  // channels of a block of `add_up`

// For each tap of the kernel, the index of its sums, and its folded channel.
struct TapPlaces {
    short places[kTaps] = {}, folded[kTaps] = {};

    constexpr TapPlaces() {
        const Tables tables = Tables();
        for (int tap = 0; tap < kTaps; tap++) {
            const int down = tap / KERNEL_W * DILATE_H, across = tap % KERNEL_W * DILATE_W;
            const int a = down % STRIDE_H, b = across % STRIDE_W;
            int pair = 0;
            if (FOLD_TAPS) {
                folded[tap] = (FOLD ? a * kFoldW + b : 0) * kFoldedTaps + across / kFoldW;
            } else if (FOLD) {
                folded[tap] = a * kFoldW + b;
            } else {
                while (tables.remainders_h[pair] != a || tables.remainders_w[pair] != b) pair++;
            }
            const int place_w = FOLD_TAPS ? 0 : across / STRIDE_W;
            int place = tables.first_taps[pair];
            while (tables.taps_h[place] != down / STRIDE_H || tables.taps_w[place] != place_w) {
                place++;
            }
            places[tap] = place;
        }
    }
};

__constant__ TapPlaces tap_places = TapPlaces();

// The sum of all splits, for a filter, a channel of its group and a tap.
__device__ __forceinline__ float sum_of(const Workspace &work, int parts, int filter,
                                        int of_group, int tap) {
    const int channel = filter / kGroupOut * kGroupIn + of_group;
    const int set = filter / kSetOut, row = filter % kSetOut;
    const int column = channel % kSetIn * kFold + tap_places.folded[tap];
    const size_t of_row = size_t(set) * kRowTiles * kRows + row;
    const float *from = work.sums +
                        (of_row * kAllTaps + tap_places.places[tap]) * (kColumnTiles * COLUMNS) +
                        column;
    float sum = 0;
    for (int part = 0; part < parts; part++) sum += from[part * kPartSums];
    return sum;
}

// A block has kAdded channels of a filter: it reads by channel and writes by tap.
extern "C" __global__ void __launch_bounds__(256)
    add_up(ELEMENT *__restrict__ dw, const ELEMENT *__restrict__ x, const ELEMENT *__restrict__ dy,
           void *__restrict__ memory, int batch, int parts) {
    __shared__ float sums[kAdded * kTaps];
    const Workspace work(memory, batch);
    constexpr int kBlocks = divide_up(kGroupIn, kAdded);
    const int filter = blockIdx.x / kBlocks, first = blockIdx.x % kBlocks * kAdded;
    const int channels = min(kGroupIn - first, kAdded);
    for (int i = threadIdx.x; i < kAdded * kTaps; i += 256) {
        const int c = i % kAdded, tap = i / kAdded;
        if (c < channels) sums[c * kTaps + tap] = sum_of(work, parts, filter, first + c, tap);
    }
    __syncthreads();
    ELEMENT *to = dw + (size_t(filter) * kGroupIn + first) * kTaps;
    for (int i = threadIdx.x; i < channels * kTaps; i += 256) {
        float sum = sums[i];
        if (!isfinite(sum)) {
            const int channel = filter / kGroupOut * kGroupIn + first + i / kTaps;
            sum = weight_sum<float, IN_H, IN_W, OUT_H, OUT_W>(
                x + channel * kInPlane, size_t(IN_CHANNELS) * kInPlane, dy + filter * kOutPlane,
                size_t(OUT_CHANNELS) * kOutPlane, batch, i % kTaps);
        }
        store(to + i, sum, (const float *)nullptr, 0);
    }
}
