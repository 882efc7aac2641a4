// Implicit GEMM on tensor cores at float32 accuracy, in one launch. Blocks read the arrays
// directly, and split each float on its way to shared memory into two fp16 (split_fp16x2.cuh) or,
// with PARTS 3, three bf16 (split_bf16x3.cuh) numbers. Hopper multiplies by wgmma (wgmma.cuh),
// other GPUs by mma.sync (mma.cuh, BY_WARPS). implicit_gemm_prepacked.cu splits in a launch of its
// own: that costs memory traffic, and saves arithmetic where many taps use a number.
//
// The product is rows by columns, summed over k:
//
//     DIRECTION   rows                  columns                  k
//     FORWARD     filters of a group    positions of y           channels and taps, as in w
//     DATA        channels of a group   positions of x           filters and taps
//     WEIGHT      filters of a group    channels and taps        positions of y, of all images
//
// The gradient for x has strides only with 1x1 kernels without padding: columns are then positions
// of dy, and the pixels of dx between them are zero.
//
// A block computes tiles of rows by columns, DEPTH values of k (a slab) at a time. With fp16, each
// row and each column of a slab has a power-of-two scale. While the tensor cores multiply one slab,
// the block converts the next one and loads the one after it, across the ends of tiles. Tensor
// cores truncate their accumulators, so each slab's sums are added up in float32 registers.
//
// A cluster of CLUSTER blocks divides a tile's k and adds up its sums in shared memory; beyond
// that, `splits` clusters divide it, and `add_up` adds their sums. Both orders are fixed. A number
// that is not finite, or out of range, makes sums infinite or NaN; such elements are recomputed in
// double precision.
//
// Measured: fa19_1 5.52 ms, fa19_2 6.36 ms; batch 10000, NVIDIA H200.

#ifndef PARTS  // numbers that a float is split into: 2 fp16 or 3 bf16
#define PARTS 2
#endif
#if PARTS == 3
#define MULTIPLIED "bf16"
#include "split_bf16x3.cuh"
#else
#include "split_fp16x2.cuh"
#endif
#include "output.cuh"
#include "shape.cuh"
#ifdef BY_WARPS
#include "mma.cuh"
#else
#include "wgmma.cuh"
#endif

#ifndef GROUPS
#define GROUPS 1
#endif
#define FORWARD 0
#define DATA 1
#define WEIGHT 2

// Tiling: k per slab; columns of four warps; whether the two groups of four warps divide a tile's
// rows (2) or columns (1); blocks of a cluster; blocks of a multiprocessor.
#ifndef DEPTH
#define DEPTH 32
#define COLUMNS 64
#define ROW_GROUPS 1
#define CLUSTER 1
#define BLOCKS 2
#endif

#include "implicit_gemm_fused_sources.cuh"

// The rows or columns of one slab, split: records of 8 values of k. A pitch of LINES + 1 records
// puts the units of a line into different banks.
template <int LINES>
struct Slab {
    uint4 records[PARTS][kUnits][LINES + 1];
#if PARTS == 2
    float factors[LINES];

    // The scale of a line before the split: a power of two from its largest magnitude. The lanes
    // that share a line differ in the bits from FIRST to below END.
    template <int FIRST, int END, int N>
    __device__ __forceinline__ float scale(const float (&values)[N], int line, bool writes) {
        float largest = fabsf(values[0]);
#pragma unroll
        for (int i = 1; i < N; i++) largest = larger_or_nan(largest, values[i]);
        unsigned most = magnitude(largest);
        if (FIRST == 1 && END == 32) {
            most = __reduce_max_sync(0xffffffffu, most);
        } else {
#pragma unroll
            for (int lanes = FIRST; lanes < END; lanes *= 2) {
                most = max(most, __shfl_xor_sync(0xffffffffu, most, lanes));
            }
        }
        float factor;
        const float scale = scale_for(most, &factor);
        if (writes) factors[line] = factor;
        return scale;
    }

    // Reverses the scale in the sums of a line, or of this line and the next.
    __device__ __forceinline__ float factor(int line) const { return factors[line]; }
    __device__ __forceinline__ float2 two_factors(int line) const {
        return *(const float2 *)&factors[line];
    }
#else
    template <int FIRST, int END, int N>
    __device__ __forceinline__ float scale(const float (&)[N], int, bool) {
        return kUp;
    }
    __device__ __forceinline__ float factor(int) const { return 1 / kUp; }
    __device__ __forceinline__ float2 two_factors(int) const {
        return make_float2(1 / kUp, 1 / kUp);
    }
#endif
};

// Loads and converts slabs of an array in which neighbouring addresses are lines: each thread has
// part of one line.
template <class Source, int LINES>
struct AlongLines {
    static constexpr int kLineThreads = kThreads / LINES, kValues = DEPTH / kLineThreads;
    static_assert(kLineThreads * LINES == kThreads && kValues % 8 == 0);
    Source source;
    Part line;
    float values[kValues];

    __device__ static int own_line() {
        return threadIdx.x / 32 * (32 / kLineThreads) + threadIdx.x % (32 / kLineThreads);
    }
    __device__ static int own_part() { return threadIdx.x % 32 / (32 / kLineThreads); }

    __device__ __forceinline__ void enter(int group, unsigned first, int batch) {
        line = source.line(group, first + own_line(), batch);
    }

    __device__ __forceinline__ void load_unit(int i, unsigned k, int batch) {
        k += own_part() * kValues + i;
        if (Source::kPitch > 0 && k + 8 <= k_count(batch)) {
            const float *from = source.array + line.offset + ptrdiff_t(k) * Source::kPitch;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                values[i + j] = line.there ? __ldg(from + j * Source::kPitch) : 0;
            }
            return;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) values[i + j] = ::load(source, line, source.at(k + j, batch));
    }

    __device__ __forceinline__ void load(unsigned k, int batch) {
#pragma unroll
        for (int i = 0; i < kValues; i += 8) load_unit(i, k, batch);
    }

    // Converts the loaded slab and loads the one at `k` into the same registers.
    __device__ __forceinline__ void convert(Slab<LINES> &slab, bool more, unsigned k, int batch) {
        const int to = own_line(), part_of_line = own_part();
        const bool writes = part_of_line == 0;
        const float scale = slab.template scale<32 / kLineThreads, 32>(values, to, writes);
#pragma unroll
        for (int i = 0; i < kValues; i += 8) {
            const int unit = (part_of_line * kValues + i) / 8;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                slab.records[part][unit][to] = record(values + i, scale, part);
            }
            if (more) load_unit(i, k, batch);
        }
    }
};

// The same for arrays in which neighbouring addresses are values of k: each thread has two values
// of several lines.
template <class Source, int LINES>
struct AlongK {
    static constexpr int kLanes = DEPTH / 2, kAtOnce = 32 / kLanes * (kThreads / 32);
    static constexpr int kTurns = LINES / kAtOnce;
    static_assert(kTurns * kAtOnce == LINES);
    Source source;
    unsigned first;
    int group;
    Part points[2];
    float values[kTurns][2];

    __device__ static int own_line(int turn) {
        return turn * kAtOnce + threadIdx.x / 32 * (32 / kLanes) + threadIdx.x % 32 / kLanes;
    }
    __device__ static int own_k() { return threadIdx.x % kLanes * 2; }

    __device__ __forceinline__ void enter(int of_group, unsigned from, int) {
        group = of_group, first = from;
    }

    __device__ __forceinline__ void enter_slab(unsigned k, int batch) {
        points[0] = source.at(k + own_k(), batch);
        points[1] = source.at(k + own_k() + 1, batch);
    }

    __device__ __forceinline__ void load_turn(int turn, int batch) {
        Part line = source.line(group, first + own_line(turn), batch);
        if (Source::kLinePitch > 0) {
            line.offset = source.line(group, first + own_line(0), batch).offset +
                          turn * kAtOnce * Source::kLinePitch;
        }
        // With kPairs, both numbers of a float2 are present or neither.
        if (Source::kPairs && size_t(source.array) % 8 == 0) {
            const bool there = line.there && points[0].there;
            const float *at = source.array + (line.offset + points[0].offset);
            const float2 pair = there ? __ldg((const float2 *)at) : make_float2(0, 0);
            values[turn][0] = pair.x, values[turn][1] = pair.y;
        } else {
            values[turn][0] = ::load(source, line, points[0]);
            values[turn][1] = ::load(source, line, points[1]);
        }
    }

    __device__ __forceinline__ void load(unsigned k, int batch) {
        enter_slab(k, batch);
#pragma unroll
        for (int turn = 0; turn < kTurns; turn++) load_turn(turn, batch);
    }

    __device__ __forceinline__ void convert(Slab<LINES> &slab, bool more, unsigned k, int batch) {
        if (more) enter_slab(k, batch);
        const int unit = own_k() / 8, word = own_k() % 8 / 2;
#pragma unroll
        for (int turn = 0; turn < kTurns; turn++) {
            const int to = own_line(turn);
            const float scale = slab.template scale<1, kLanes>(values[turn], to, own_k() == 0);
            const float a = values[turn][0] * scale, b = values[turn][1] * scale;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                ((uint32_t *)&slab.records[part][unit][to])[word] = pair_of(a, b, part);
            }
            if (more) load_turn(turn, batch);
        }
    }
};

template <class Source, int LINES>
using Loader =
    typename Either<Source::kAlongK, AlongK<Source, LINES>, AlongLines<Source, LINES>>::Type;

struct Stage {
    Slab<kTileRows> rows;
    Slab<kTileColumns> columns;
};

struct Shared {
    Stage stages[2];
#if CLUSTER > 1
    float sums[kTileRows][kTileColumns + 8];
#else
    float sums[kThreads / 32][16][40];  // per warp; the pitch puts rows 8 banks apart
#endif
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// One tile, group and split of k; `slab` and `end` bound the slabs of this block.
struct Item {
    unsigned number;
    int group, split;
    unsigned row, column;  // of the tile's first element
    unsigned slab, end;

    __device__ __forceinline__ void enter(unsigned of_all, unsigned column_tiles, unsigned slabs,
                                          int splits, unsigned rank) {
        number = of_all;
        row = of_all % kRowTiles * kTileRows, of_all /= kRowTiles;
        column = of_all % column_tiles * kTileColumns, of_all /= column_tiles;
        group = of_all % GROUPS, split = of_all / GROUPS;
        const unsigned long long part = split * CLUSTER + rank;
        slab = part * slabs / (splits * CLUSTER), end = (part + 1) * slabs / (splits * CLUSTER);
        if (slab == end) slab = slabs, end = slabs + 1;  // empty: one slab of zeros
    }
};

// One element by direct convolution. Pixels outside the image are skipped, not multiplied as
// zeros. Arguments by value stay in registers.
__device__ __noinline__ float textbook(RowSource rows, ColumnSource columns, int group,
                                       unsigned row, unsigned column, int batch) {
    const Part of_row = rows.line(group, row, batch);
    const Part of_column = columns.line(group, column, batch);
    double sum = 0;
#pragma unroll 1
    for (unsigned k = 0; k < k_count(batch); k++) {
        const Part there = columns.at(k, batch);
        if (ColumnSource::has(of_column, there)) {
            sum += double(load(rows, of_row, rows.at(k, batch))) * load(columns, of_column, there);
        }
    }
    return float(sum);
}

struct Arrays {
    float *out;
    RowSource rows;
    ColumnSource columns;
    const float *bias;
    float *partial;  // sums of each split
    int batch, splits;

    // The address of one split's sum.
    __device__ __forceinline__ float *partial_at(int split, int group, unsigned row,
                                                 unsigned column) const {
        const size_t columns = column_count(batch);
        return partial + ((size_t(split) * GROUPS + group) * kRows + row) * columns + column;
    }

    // The bias of a row's sums, unless `add_up` adds it.
    __device__ __forceinline__ float bias_of(const Item &item, unsigned row) const {
        return BIAS && splits == 1 && row < kRows ? bias[item.group * kRows + row] : 0;
    }

    // Writes MOST sums f(i) of rows `row` + i of a column, or stores them for `add_up`.
    template <int MOST, class F>
    __device__ __forceinline__ void write(const Item &item, unsigned row, unsigned column,
                                          F f) const {
        if (column >= column_count(batch)) return;
        if (splits > 1) {
            float *to = partial_at(item.split, item.group, row, column);
            const size_t pitch = column_count(batch);
#pragma unroll
            for (int i = 0; i < MOST; i++) {
                if (row + i < kRows) to[i * pitch] = f(i);
            }
            return;
        }
        const int line = item.group * kRows + row;
        float *to = out + place_of(column) + size_t(line) * kRowPitch;
        unsigned again = 0;  // bit i: sum i is not finite
        float before[MOST];
#pragma unroll
        for (int i = 0; i < MOST; i++) before[i] = row + i < kRows ? held(to + i * kRowPitch) : 0;
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            const float sum = f(i);
            const bool is_usual = isfinite(sum);
            if (row + i < kRows && is_usual) write_one(to + i * kRowPitch, column, sum, before[i]);
            again |= unsigned(row + i < kRows && !is_usual) << i;
        }
        for (; again; again &= again - 1) {
            const int i = __ffs(again) - 1;
            const float sum = textbook(rows, columns, item.group, row + i, column, batch) +
                              bias_of(item, row + i);
            write_one(to + i * kRowPitch, column, sum, held(to + i * kRowPitch));
        }
    }

    // The offset of a column's element in row 0 of the output.
    static __device__ __forceinline__ size_t place_of(unsigned column) {
        if (DIRECTION == WEIGHT) return column;
        const unsigned image = column / Pixels::kPositions, inside = column % Pixels::kPositions;
        if (DIRECTION == FORWARD) return size_t(image) * kOutImage + inside;
        const unsigned pixel =
            kStrided ? inside / kOutW * (STRIDE_H * WIDTH) + inside % kOutW * STRIDE_W : inside;
        return size_t(image) * kImage + pixel;
    }

    static __device__ __forceinline__ void write_one(float *to, unsigned column, float sum,
                                                     float before) {
        store_biased(to, sum, before);
        if (!kByOutput || !kStrided) return;
        // Zeros for the pixels that the stride skips.
        const int inside = column % kOutPlane;
        const int height = HEIGHT - inside / kOutW * STRIDE_H;
        const int width = WIDTH - inside % kOutW * STRIDE_W;
#pragma unroll
        for (int i = 0; i < STRIDE_H * STRIDE_W; i++) {
            const int row = i / STRIDE_W, across = i % STRIDE_W;
            if (i > 0 && row < height && across < width) {
                float *const skipped = to + row * WIDTH + across;
                store_biased(skipped, 0, held(skipped));
            }
        }
    }
};

constexpr int kSums = COLUMNS / 2;  // of one thread

// The tile of one group of four warps. A thread's sums are in rows `row` and `row` + 8, and in two
// of every 8 columns.
struct Worker {
    int first_row, first_column, row, column;
    float part[kSums], total[kSums];

    __device__ Worker() {
        const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
        first_row = ROW_GROUPS == 2 ? group * 64 : 0;
        first_column = ROW_GROUPS == 2 ? 0 : group * COLUMNS;
        row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        column = first_column + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < kSums; i++) total[i] = 0;
    }

    __device__ __forceinline__ void begin(const Stage &stage) {
        constexpr int kAlongRows = kTileRows + 1, kAlongColumns = kTileColumns + 1;
        const uint64_t a = describe(&stage.rows.records[0][0][first_row], kAlongRows);
        const uint64_t b = describe(&stage.columns.records[0][0][first_column], kAlongColumns);
        hold(part);
        begin_multiplying();
        multiply_parts<PARTS, kUnits>(part, a, b, kAlongRows, kAlongColumns);
        multiplying_begun();
    }

    __device__ __forceinline__ void end(const Stage &stage) {
        multiplied<0>();
        hold(part);
        const float upper = stage.rows.factor(row), lower = stage.rows.factor(row + 8);
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
            const float2 factors = stage.columns.two_factors(column + 2 * i);
            total[i] += part[i] * upper * factors.x;
            total[i + 1] += part[i + 1] * upper * factors.y;
            total[i + 2] += part[i + 2] * lower * factors.x;
            total[i + 3] += part[i + 3] * lower * factors.y;
        }
    }

    // Writes the tile so that lanes write neighbouring columns, then clears the sums.
    __device__ __forceinline__ void write(Shared &shared, const Arrays &arrays, const Item &item) {
        // One block of a cluster adds the bias.
        if (BIAS && blockIdx.x % CLUSTER == 0) {
            const float upper = arrays.bias_of(item, item.row + row);
            const float lower = arrays.bias_of(item, item.row + row + 8);
#pragma unroll
            for (int i = 0; i < kSums; i++) total[i] += i / 2 % 2 ? lower : upper;
        }
#if CLUSTER > 1
        write_by_cluster(shared, arrays, item);
#else
        const int lane = threadIdx.x % 32;
        float(*sums)[40] = shared.sums[threadIdx.x / 32];
#pragma unroll
        for (int first = 0; first < COLUMNS; first += 32) {
            __syncwarp();
#pragma unroll
            for (int i = first; i < first + 32 && i < COLUMNS; i += 8) {
                float *to = &sums[lane / 4][i - first + lane % 4 * 2];
                *(float2 *)to = make_float2(total[i / 2], total[i / 2 + 1]);
                *(float2 *)(to + 8 * 40) = make_float2(total[i / 2 + 2], total[i / 2 + 3]);
            }
            __syncwarp();
            if (first + lane < COLUMNS) {
                arrays.write<16>(item, item.row + row - lane / 4,
                                 item.column + first_column + first + lane,
                                 [&](int i) { return sums[i][lane]; });
            }
        }
#endif
#pragma unroll
        for (int i = 0; i < kSums; i++) total[i] = 0;
    }

#if CLUSTER > 1
    __device__ __forceinline__ static void wait_for_cluster() {
        __cluster_barrier_arrive();
        __cluster_barrier_wait();
    }

    // Each block of the cluster adds up some of the rows.
    __device__ __forceinline__ void write_by_cluster(Shared &shared, const Arrays &arrays,
                                                     const Item &item) {
#pragma unroll
        for (int i = 0; i < kSums; i += 2) {
            *(float2 *)&shared.sums[row + i / 2 % 2 * 8][column + i / 4 * 8] =
                make_float2(total[i], total[i + 1]);
        }
        wait_for_cluster();
        constexpr int kOwnRows = kTileRows / CLUSTER;
        const int first = int(__clusterRelativeBlockRank()) * kOwnRows;
        for (int i = threadIdx.x; i < kOwnRows * kTileColumns; i += kThreads) {
            const int of_tile = first + i / kTileColumns, across = i % kTileColumns;
            float sum = 0;
#pragma unroll
            for (int block = 0; block < CLUSTER; block++) {
                const float *own = &shared.sums[of_tile][across];
                sum += *(const float *)__cluster_map_shared_rank(own, block);
            }
            arrays.write<1>(item, item.row + of_tile, item.column + across,
                            [&](int) { return sum; });
        }
        wait_for_cluster();
    }
#endif
};

// Software pipeline over the slabs of a block: load, convert, multiply.
struct Pipeline {
    Shared &shared;
    const Arrays &arrays;
    const unsigned column_tiles, slabs, count, rank, clusters;
    Loader<RowSource, kTileRows> rows;
    Loader<ColumnSource, kTileColumns> columns;
    Item next;  // of the loaded slab

    __device__ Pipeline(Shared &shared, const Arrays &arrays)
        : shared(shared),
          arrays(arrays),
          column_tiles(divide_up(column_count(arrays.batch), kTileColumns)),
          slabs(divide_up(k_count(arrays.batch), DEPTH)),
          count(kRowTiles * column_tiles * GROUPS * arrays.splits),
          rank(blockIdx.x % CLUSTER),
          clusters(gridDim.x / CLUSTER),
          rows{arrays.rows},
          columns{arrays.columns} {}

    __device__ __forceinline__ void enter(unsigned number) {
        next.enter(number, column_tiles, slabs, arrays.splits, rank);
        rows.enter(next.group, next.row, arrays.batch);
        columns.enter(next.group, next.column, arrays.batch);
    }

    // Loads the first slab of the first item.
    __device__ __forceinline__ void load() {
        enter(blockIdx.x / CLUSTER);
        rows.load(next.slab * DEPTH, arrays.batch), columns.load(next.slab * DEPTH, arrays.batch);
    }

    // Converts the loaded slab, loads the next one, and returns the converted slab's item.
    __device__ __forceinline__ Item convert(Stage &stage) {
        const Item loaded = next;
        if (++next.slab == next.end) enter(next.number + clusters);
        rows.convert(stage.rows, more(), next.slab * DEPTH, arrays.batch);
        columns.convert(stage.columns, more(), next.slab * DEPTH, arrays.batch);
        return loaded;
    }

    __device__ __forceinline__ bool more() const { return next.number < count; }

    __device__ __forceinline__ void run() {
        load();
        Item current = convert(shared.stages[0]);
        converted();
        Worker worker;
        worker.begin(shared.stages[0]);
        int stage = 0;
        for (; more(); stage ^= 1) {
            const Item loaded = convert(shared.stages[stage ^ 1]);
            worker.end(shared.stages[stage]);
            if (current.slab + 1 == current.end) worker.write(shared, arrays, current);
            converted();
            worker.begin(shared.stages[stage ^ 1]);
            current = loaded;
        }
        worker.end(shared.stages[stage]);
        worker.write(shared, arrays, current);
    }

    // Makes the threads' writes visible to the other threads and to the tensor cores.
    static __device__ __forceinline__ void converted() {
        show_writes();
        __syncthreads();
    }
};

// Persistent blocks: the grid has whole clusters, at most one for each item, and a cluster takes
// every item at a distance of the number of clusters.
#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTER
#endif
extern "C" __global__ void OF_CLUSTER __launch_bounds__(kThreads, BLOCKS)
    multiply_tiles(float *__restrict__ out, const float *__restrict__ rows,
                   const float *__restrict__ columns, const float *__restrict__ bias,
                   float *__restrict__ partial, int batch, int splits) {
    extern __shared__ __align__(128) char bytes[];
    const Arrays arrays{out, {rows}, {columns}, bias, partial, batch, splits};
    Pipeline(*(Shared *)bytes, arrays).run();
}

// Sums of all splits, one thread for each element.
extern "C" __global__ void __launch_bounds__(256)
    add_up(float *__restrict__ out, const float *__restrict__ rows,
           const float *__restrict__ columns, const float *__restrict__ bias,
           float *__restrict__ partial, int batch, int splits) {
    const Arrays arrays{out, {rows}, {columns}, bias, partial, batch, 1};
    const size_t of_line = column_count(batch);
    const size_t number = size_t(blockIdx.x) * 256 + threadIdx.x;
    if (number >= of_line * kRows * GROUPS) return;
    const unsigned column = number % of_line, line = number / of_line;
    Item item{};
    item.group = line / kRows;
    float sum = 0;
    for (int split = 0; split < splits; split++) {
        sum += *arrays.partial_at(split, item.group, line % kRows, column);
    }
    sum += arrays.bias_of(item, line % kRows);
    arrays.write<1>(item, line % kRows, column, [&](int) { return sum; });
}
