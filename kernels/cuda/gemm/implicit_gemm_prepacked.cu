// Implicit GEMM on Hopper's tensor cores at float32 accuracy, with prepacked operands: forward, and
// the gradient for x. Any stride, padding, dilation and groups.
//
// 1. `lay_out` packs the input into records of 16 bytes: 8 channels of a pixel in fp16, in 2 parts
//    (split_fp16x2.cuh) or one (PARTS). Records form a grid: the rows of all images, with zeros
//    between rows and images. So a tap is a constant offset, and padding needs no branch later.
//    Weights are packed in the same way.
// 2. `multiply_tiles` multiplies rows (filters, or channels of dx) by positions of the grid. One
//    thread issues bulk copies to shared memory; eight warps multiply (wgmma.cuh). Tensor cores
//    truncate their accumulators, so the sums of each tap of DEPTH channels are added up in float32
//    registers; not those of halves, which are rounded by more.
// 3. `add_up` adds the sums of blocks that divide the channels, in a fixed order.
//
// Each pixel has a power-of-two scale for DEPTH of its channels, unless it is in halves, and each
// row of weights has one scale: they bring numbers into the range of fp16. A number that is not
// finite, or beyond 2^96 or 2^-96, makes results NaN; elements that are not finite are recomputed
// by direct convolution.
//
// With a stride, x is packed as one grid for each remainder of rows and columns (a phase), and the
// gradient for x is one product for each remainder (a job). With few channels, the remainders
// become channels instead (FOLD), and the taps of a row may, too (FOLD_TAPS). Several small groups
// form a set, whose product has zeros between the groups.
//
// Measured: fa19_1 9.68 ms, fa19_2 5.31 ms; batch 10000, NVIDIA H200.
#include "copy_engine.cuh"
#include "gemm_grid.cuh"
#include "wgmma.cuh"

// Tiling: channels at once; positions of four warps (32, 64 or 128); how many of the two groups of
// four warps have their own filters; positions beyond a tile that taps read; stages of pixels and
// of weights in shared memory.
#ifndef DEPTH
#define DEPTH 32
#define COLUMNS 128
#define ROW_GROUPS 1
#define HALO 116
#define PIXEL_STAGES 2
#define WEIGHT_STAGES 8
#endif

constexpr int kSlabs = divide_up(kDepth, DEPTH);
constexpr int kUnits = DEPTH / 8;
constexpr int kRows = 64 * ROW_GROUPS;  // of a tile
constexpr int kRowTiles = divide_up(kSetRows, kRows);
constexpr int kTile = COLUMNS * (2 / ROW_GROUPS);  // positions
constexpr int kSpan = kTile + HALO;                // and those that its taps read
static_assert(HALO % 4 == 0 && DEPTH % 16 == 0);

// Whether pixels have scales, and sums go to registers.
constexpr bool kScaled = PARTS == 2 || sizeof(X_TYPE) == sizeof(float);

// A tile of weights for one tap: parts, units of 8 channels, rows.
constexpr int kWeightRecords = PARTS * kUnits * kRows;
constexpr size_t kAllWeights = size_t(kAllTaps) * kSlabs * SETS * kRowTiles * kWeightRecords;
constexpr int kAllRows = SETS * kRowTiles * kRows;

// Global memory shared by the launches: weights and the rows' scales; the pixels' scales and
// records; sums of `splits` parts of the channels. Weights come first, or have memory of their own,
// in which they can stay for later calls.
struct Workspace {
    uint4 *weights;
    float *row_factors, *factors;
    uint4 *pixels;
    float *sums;
    size_t length;   // positions of a plane, and those that the last tile's taps read
    unsigned tiles;  // of positions

    __device__ Workspace(void *prepared, void *memory, int batch) {
        tiles = divide_up(batch * kPositions, kTile);
        length = size_t(tiles) * kTile + HALO;
        weights = (uint4 *)prepared;
        row_factors = (float *)(weights + kAllWeights);
        factors = prepared == memory ? row_factors + kAllRows : (float *)memory;
        pixels = (uint4 *)(factors + SETS * kPhases * kSlabs * length);
        sums = (float *)(pixels + SETS * kPhases * kSlabs * PARTS * kUnits * length);
    }
};

// The operand that is multiplied by weights.
struct Input {
    const X_TYPE *x;
    const float *factors, *addends;

    __device__ __forceinline__ Input(const X_TYPE *x, const float *factors = nullptr,
                                     const float *addends = nullptr)
        : x(x), factors(factors), addends(addends) {}

    // An element of channel c of x.
    __device__ __forceinline__ float at(const X_TYPE *element, int c) const {
        float v = load(element);
        CONVERT(v, c);
        return v;
    }
};

// Packs DEPTH channels of a position.
__device__ __forceinline__ void lay_out_pixel(const Workspace &work, const Input &input, int batch,
                                              int plane, unsigned position) {
    const int phase = plane / kSlabs % kPhases;
    const int set = plane / kSlabs / kPhases, first = plane % kSlabs * DEPTH;
    const unsigned image = position / kPositions, inside = position % kPositions;
    const int row0 = int(inside / GRID_W) * IN_STEP_H + IN_FIRST_H;
    const int column0 = int(inside % GRID_W) * IN_STEP_W + IN_FIRST_W;
    const X_TYPE *from = input.x + size_t(image) * IN_IMAGE + set * kSetIn * kInPlane;
    float values[DEPTH];
    unsigned most = 0;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        const int channel = (first + k) / (BACKWARD ? 1 : kFold);
        const int remainder = BACKWARD || kFold == 1 ? 0 : (first + k) % kFold;
        const int row =
            row0 + (BACKWARD ? 0 : tables.remainders_h[phase] + folded_down(remainder));
        const int column =
            column0 + (BACKWARD ? 0 : tables.remainders_w[phase] + folded_across(remainder));
        const bool there = image < batch && first + k < kDepth && unsigned(row) < IN_H &&
                           unsigned(column) < IN_W;
        const X_TYPE *element = from + channel * kInPlane + row * IN_W + column;
        values[k] = there ? input.at(element, set * kSetIn + channel) : 0;
        most = max(most, magnitude(values[k]));
    }
    float scale = 1;
    if (kScaled) scale = scale_for(most, work.factors + plane * work.length + position);
    uint4 *to = work.pixels + plane * size_t(PARTS * kUnits) * work.length + position;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int unit = 0; unit < kUnits; unit++) {
            to[(part * kUnits + unit) * work.length] = record(values + 8 * unit, scale, part);
        }
    }
}

// The weight of a row and a channel of a set's product, for a tap of the grid; zero where the
// kernel has no tap. Indices count within the set, with folded channels.
__device__ __forceinline__ float weight(const ELEMENT *w, int set, int row, int k, int pair,
                                        int tap) {
    if (row >= kSetRows || k >= kDepth) return 0;
    const int folded = (BACKWARD ? row : k) % kFold;
    const int out = set * kSetOut + row / (BACKWARD ? kFold : 1);
    const int in = set * kSetIn + k / (BACKWARD ? 1 : kFold);
    if (GROUPS != SETS && out / kGroupOut != in / kGroupIn) return 0;
    const int step_h = BACKWARD ? OUT_STEP_H : IN_STEP_H;
    const int step_w = BACKWARD ? OUT_STEP_W : IN_STEP_W;
    const int steps_h = BACKWARD ? LAST_H - tables.taps_h[tap] : tables.taps_h[tap];
    const int steps_w = BACKWARD ? LAST_W - tables.taps_w[tap] : tables.taps_w[tap];
    const int row_of_kernel = steps_h * step_h + tables.remainders_h[pair] + folded_down(folded);
    const int column_of_kernel =
        steps_w * step_w + tables.remainders_w[pair] + folded_across(folded);
    const int p = row_of_kernel / DILATE_H, q = column_of_kernel / DILATE_W;
    const bool there = row_of_kernel >= 0 && row_of_kernel % DILATE_H == 0 && p < KERNEL_H &&
                       column_of_kernel >= 0 && column_of_kernel % DILATE_W == 0 && q < KERNEL_W;
    if (!there) return 0;
    const size_t of_filter = BACKWARD ? size_t(in) * kGroupOut + out % kGroupOut
                                      : size_t(out) * kGroupIn + in % kGroupIn;
    return load(w + of_filter * kTaps + p * KERNEL_W + q);
}

// Packs a row of weights, one record by each thread.
__device__ __forceinline__ void lay_out_row(const Workspace &work, const ELEMENT *w, int of_all) {
    __shared__ unsigned largest[8];
    const int set = of_all / (kRowTiles * kRows), row = of_all % (kRowTiles * kRows);
    const int tile = row / kRows, out = set * kSetOut + row / (BACKWARD ? kFold : 1);
    unsigned most = 0;
    // The scale covers the filter's or channel's weights of all remainders.
    if (row < kSetRows) {
        for (int i = threadIdx.x; i < kGroupIn * kTaps; i += 256) {
            const int in = out / kGroupOut * kGroupIn + i / kTaps;
            const size_t at = BACKWARD
                                  ? (size_t(in) * kGroupOut + out % kGroupOut) * kTaps + i % kTaps
                                  : size_t(out) * kGroupIn * kTaps + i;
            most = max(most, magnitude(load(w + at)));
        }
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < 8; warp++) most = max(most, largest[warp]);
    float factor;
    const float scale = scale_for(most, &factor);
    if (threadIdx.x == 0) work.row_factors[of_all] = factor;

    for (int job = 0; job < kJobs; job++) {
        const int begin = tables.first_taps[job * kPhases];
        const int taps = tables.first_taps[(job + 1) * kPhases] - begin;
        uint4 *to = work.weights + size_t(kWeightRecords) * kSlabs *
                                       (size_t(begin) * SETS * kRowTiles +
                                        size_t(taps) * (set * kRowTiles + tile));
        for (int i = threadIdx.x; i < taps * kSlabs * kUnits; i += 256) {
            const int tap = begin + i % taps, unit = i / taps % kUnits, slab = i / taps / kUnits;
            int pair = job * kPhases;
            while (tap >= tables.first_taps[pair + 1]) pair++;
            float values[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                values[k] = weight(w, set, row, slab * DEPTH + unit * 8 + k, pair, tap);
            }
            const int first = tables.first_taps[pair];
            const int of_pair = tables.first_taps[pair + 1] - first;
            const int chunk = (first - begin) * kSlabs + slab * of_pair + tap - first;
            uint4 *at = to + chunk * size_t(kWeightRecords) + unit * kRows + row % kRows;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                at[part * kUnits * kRows] = record(values, scale, part);
            }
        }
    }
}

// Blocks below `rows` (all rows of weights, or 0) pack a row each; the others pack 256 positions of
// a plane each.
extern "C" __global__ void __launch_bounds__(256)
    lay_out(void *__restrict__ prepared, void *__restrict__ memory, const X_TYPE *__restrict__ x,
            const ELEMENT *__restrict__ w, int batch, int rows CONVERT_PARAMETERS) {
    const Workspace work(prepared, memory, batch);
    if (blockIdx.x < rows) {
        lay_out_row(work, w, blockIdx.x);
        return;
    }
    const unsigned block = blockIdx.x - rows, blocks = divide_up(work.length, 256);
    const unsigned position = block % blocks * 256 + threadIdx.x;
    const Input input(x CONVERT_ARGUMENTS);
    if (position < work.length) lay_out_pixel(work, input, batch, block / blocks, position);
}

// An output element: its image, channel, row and column; `there` if the output has it.
struct Element {
    int image, out, h, s;
    bool there;

    // From a set's product row, and row i and column j of the grid.
    __device__ __forceinline__ Element(int set, int row, int job, int image, int i, int j)
        : image(image) {
        const int folded = BACKWARD ? row % kFold : 0;
        out = set * kSetOut + row / (BACKWARD ? kFold : 1);
        h = i * OUT_STEP_H + OUT_FIRST_H +
            (BACKWARD ? tables.remainders_h[job] + folded_down(folded) : 0);
        s = j * OUT_STEP_W + OUT_FIRST_W +
            (BACKWARD ? tables.remainders_w[job] + folded_across(folded) : 0);
        there = row < kSetRows && i < VALID_H && j < VALID_W && unsigned(h) < OUT_H &&
                unsigned(s) < OUT_W;
    }

    __device__ __forceinline__ Y_TYPE *place(Y_TYPE *y) const {
        return y + size_t(image) * OUT_IMAGE + out * kOutPlane + h * OUT_W + s;
    }
};

// An element's sum by direct convolution, in double precision. Arguments by value stay in
// registers.
__device__ __noinline__ float textbook(Element y, Input input, const ELEMENT *w) {
    double sum = 0;
#pragma unroll 1
    for (int c = 0; c < kGroupIn; c++) {
        const int in = y.out / kGroupOut * kGroupIn + c;
        const X_TYPE *plane = input.x + size_t(y.image) * IN_IMAGE + in * kInPlane;
        const ELEMENT *taps = w + kTaps * (BACKWARD ? size_t(in) * kGroupOut + y.out % kGroupOut
                                                    : size_t(y.out) * kGroupIn + c);
#pragma unroll 1
        for (int tap = 0; tap < kTaps; tap++) {
            const int down = tap / KERNEL_W * DILATE_H, across = tap % KERNEL_W * DILATE_W;
            int row = BACKWARD ? y.h + PAD_H - down : y.h * STRIDE_H - PAD_H + down;
            int column = BACKWARD ? y.s + PAD_W - across : y.s * STRIDE_W - PAD_W + across;
            if (BACKWARD) {
                if (row % STRIDE_H != 0 || column % STRIDE_W != 0) continue;
                row /= STRIDE_H, column /= STRIDE_W;
            }
            if (unsigned(row) >= IN_H || unsigned(column) >= IN_W) continue;
            sum += double(input.at(plane + row * IN_W + column, in)) * load(taps + tap);
        }
    }
    return float(sum);
}

struct Shared {
    uint4 pixels[PIXEL_STAGES][PARTS][kUnits][kSpan];
    uint4 weights[WEIGHT_STAGES][PARTS][kUnits][kRows];
    float factors[PIXEL_STAGES][kSpan];
    float results[8][16][40];  // per warp; the pitch puts rows 8 banks apart
    Barrier pixels_full[PIXEL_STAGES], pixels_free[PIXEL_STAGES];
    Barrier weights_full[WEIGHT_STAGES], weights_free[WEIGHT_STAGES];
};

#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// The work of a block at one time: a tile, and some of the channels.
struct Item {
    int row_tile, set, job, split, begin, end;  // range of (phase, slab) indices
    unsigned tile;

    __device__ Item(unsigned number, unsigned tiles, int splits) {
        row_tile = number % kRowTiles, number /= kRowTiles;
        set = number % SETS, number /= SETS;
        job = number % kJobs, number /= kJobs;
        tile = number % tiles, split = number / tiles;
        begin = split * (kPhases * kSlabs) / splits;
        end = (split + 1) * (kPhases * kSlabs) / splits;
    }

    static __device__ unsigned count(unsigned tiles, int splits) {
        return kRowTiles * SETS * kJobs * tiles * splits;
    }
};

// The copying thread: issues bulk copies of the items' operands in their order of use.
__device__ __forceinline__ void issue_copies(Shared &shared, const Workspace &work, int splits) {
    Ring<PIXEL_STAGES> pixels;
    Ring<WEIGHT_STAGES> weights;
    const unsigned count = Item::count(work.tiles, splits);
    for (unsigned number = blockIdx.x; number < count; number += gridDim.x) {
        const Item item(number, work.tiles, splits);
        const int first_of_job = tables.first_taps[item.job * kPhases];
        const int taps_of_job = tables.first_taps[(item.job + 1) * kPhases] - first_of_job;
        const uint4 *tiles_of_weights =
            work.weights + size_t(kWeightRecords) * kSlabs *
                               (size_t(first_of_job) * SETS * kRowTiles +
                                size_t(taps_of_job) * (item.set * kRowTiles + item.row_tile));
        for (int i = item.begin; i < item.end; i++) {
            const int phase = i / kSlabs, slab = i % kSlabs, pair = item.job * kPhases + phase;
            const int first = tables.first_taps[pair], taps = tables.first_taps[pair + 1] - first;
            if (taps == 0) continue;  // pixels of the gradient that no tap reaches
            const size_t plane = (size_t(item.set) * kPhases + phase) * kSlabs + slab;
            const size_t position = size_t(item.tile) * kTile;
            barrier_wait(&shared.pixels_free[pixels.number], pixels.parity ^ 1);
            Barrier *full = &shared.pixels_full[pixels.number];
            barrier_expect(full, kSpan * (PARTS * kUnits * 16 + (kScaled ? 4 : 0)));
            const uint4 *from = work.pixels + plane * PARTS * kUnits * work.length + position;
            for (int unit = 0; unit < PARTS * kUnits; unit++) {
                copy_in((float *)shared.pixels[pixels.number][0][unit],
                        (const float *)(from + unit * work.length), kSpan * 16, full);
            }
            if (kScaled) {
                copy_in(shared.factors[pixels.number],
                        work.factors + plane * work.length + position, kSpan * 4, full);
            }
            pixels.advance();

            const uint4 *chunk =
                tiles_of_weights +
                size_t(kWeightRecords) * ((first - first_of_job) * kSlabs + slab * taps);
            for (int tap = 0; tap < taps; tap++) {
                barrier_wait(&shared.weights_free[weights.number], weights.parity ^ 1);
                Barrier *there = &shared.weights_full[weights.number];
                barrier_expect(there, kWeightRecords * 16);
                copy_in((float *)shared.weights[weights.number],
                        (const float *)(chunk + tap * kWeightRecords), kWeightRecords * 16, there);
                weights.advance();
            }
        }
    }
}

constexpr int kSums = COLUMNS / 2;  // of one thread

// Iterates over an item's taps, by phase and slab.
struct Cursor {
    int job, slab, end, first, tap, last;

    __device__ explicit Cursor(const Item &item) : job(item.job), slab(item.begin), end(item.end) {
        enter();
    }

    __device__ __forceinline__ void enter() {
        const int pair = job * kPhases + (slab < end ? slab / kSlabs : 0);
        first = tap = tables.first_taps[pair], last = tables.first_taps[pair + 1];
    }

    __device__ __forceinline__ void next() {
        if (++tap == last) slab++, enter();
    }

    // The number of taps left.
    __device__ __forceinline__ int taps() const {
        int count = 0;
        for (int i = slab; i < end; i++) {
            const int pair = job * kPhases + i / kSlabs;
            count += tables.first_taps[pair + 1] - tables.first_taps[pair];
        }
        return count;
    }

    __device__ __forceinline__ bool at_slab() const { return tap == first; }
    __device__ __forceinline__ bool last_of_slab() const { return tap + 1 == last; }
};

// A tap in flight: its stages, and the scales of this thread's first position.
struct Begun {
    int weights_stage, pixels_stage;
    bool last_of_slab;
    const float *factors;
};

// The tile of one group of four warps: 64 rows, COLUMNS positions.
struct Worker {
    Shared &shared;
    const Workspace &work;
    int row0, column0;
    Ring<PIXEL_STAGES> pixels;
    Ring<WEIGHT_STAGES> weights;
    Begun before;

    // Starts a tap of DEPTH channels at a distance of `shift` positions.
    __device__ __forceinline__ void begin_tap(float (&part)[kSums], int shift) {
        barrier_wait(&shared.weights_full[weights.number], weights.parity);
        const uint64_t a = describe(&shared.weights[weights.number][0][0][row0], kRows);
        const uint64_t b = describe(&shared.pixels[pixels.number][0][0][column0], kSpan) + shift;
        if (kScaled) hold(part);
        begin_multiplying();
        if constexpr (PARTS == 2) {
            multiply_parts<2, kUnits>(part, a, b, kRows, kSpan);
        } else {
            multiply_slab<kUnits>(part, a, b, kRows, kSpan, !kScaled);
        }
        multiplying_begun();
    }

    // Adds up the previous tap's sums, while the tensor cores multiply `newer` later taps.
    template <int newer>
    __device__ __forceinline__ void end_tap(float (&total)[kSums], float (&part)[kSums]) {
        multiplied<newer>();
        if (kScaled || newer == 0) hold(part);
        if (threadIdx.x % 32 == 0) barrier_arrive(&shared.weights_free[before.weights_stage]);
        const float *factors = before.factors;
#pragma unroll
        for (int i = 0; kScaled && i < kSums; i += 4) {
            const float first = factors[i * 2], second = factors[i * 2 + 1];
            total[i] += part[i] * first;
            total[i + 1] += part[i + 1] * second;
            total[i + 2] += part[i + 2] * first;
            total[i + 3] += part[i + 3] * second;
        }
        if (before.last_of_slab) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(&shared.pixels_free[before.pixels_stage]);
        }
    }

    // Starts the next tap, then adds up the previous one.
    __device__ __forceinline__ void step(float (&total)[kSums], float (&next)[kSums],
                                         float (&last)[kSums], Cursor &cursor) {
        const Begun begun = begin_next(next, cursor);
        end_tap<1>(total, last);
        before = begun;
    }

    __device__ __forceinline__ Begun begin_next(float (&part)[kSums], Cursor &cursor) {
        if (cursor.at_slab()) barrier_wait(&shared.pixels_full[pixels.number], pixels.parity);
        const int shift = tables.taps_h[cursor.tap] * GRID_W + tables.taps_w[cursor.tap];
        begin_tap(part, shift);
        const Begun begun = {weights.number, pixels.number, cursor.last_of_slab(),
                             shared.factors[pixels.number] + column0 + shift + threadIdx.x % 4 * 2};
        weights.advance();
        if (cursor.last_of_slab()) pixels.advance();
        cursor.next();
        return begun;
    }

    // Two taps are in flight: one multiplies, while the other's sums, if scaled, are added up.
    __device__ __forceinline__ void multiply_item(float (&total)[kSums], const Item &item) {
        float even[kSums], odd[kSums];
        Cursor cursor(item);
        const int taps = cursor.taps();
        if (taps == 0) return;
        if constexpr (!kScaled) {
            before = begin_next(total, cursor);
#pragma unroll 1
            for (int tap = 1; tap < taps; tap++) step(total, total, total, cursor);
            end_tap<0>(total, total);
            return;
        }
        before = begin_next(even, cursor);
        int tap = 1;
        for (; tap + 1 < taps; tap += 2) {
            step(total, odd, even, cursor);
            step(total, even, odd, cursor);
        }
        if (tap < taps) {
            step(total, odd, even, cursor);
            end_tap<0>(total, odd);
        } else {
            end_tap<0>(total, even);
        }
    }

    // Calls f(position, row, sums) for 32 neighbouring positions at a time, one for each lane, with
    // the sums of 16 rows. Of every 8 positions, a lane has the sums of two, in two rows.
    template <class F>
    __device__ __forceinline__ void for_each(const float (&total)[kSums], const Item &item, F f) {
        const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
        const int first = item.row_tile * kRows + row0 + warp % 4 * 16;
        float(*results)[40] = shared.results[warp];
#pragma unroll
        for (int column = 0; column < COLUMNS; column += 32) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 32; i += 8) {
                const float *sums = total + (column + i) / 2;
                float *to = &results[lane / 4][i + lane % 4 * 2];
                *(float2 *)to = make_float2(sums[0], sums[1]);
                *(float2 *)(to + 8 * 40) = make_float2(sums[2], sums[3]);
            }
            __syncwarp();
            float sums[16];
#pragma unroll
            for (int r = 0; r < 16; r++) sums[r] = results[r][lane];
            f(item.tile * kTile + column0 + column + lane, first, sums);
        }
    }

    __device__ __forceinline__ void keep(const float (&total)[kSums], const Item &item) {
        const size_t columns = size_t(work.tiles) * kTile;
        const size_t plane = (size_t(item.split) * kJobs + item.job) * kAllRows +
                             item.set * kRowTiles * kRows;
        for_each(total, item, [&](unsigned position, int row, const float(&sums)[16]) {
            float *to = work.sums + (plane + row) * columns + position;
#pragma unroll
            for (int r = 0; r < 16; r++) to[r * columns] = sums[r];
        });
    }

    // The bias of this thread's row plus `further`.
    __device__ __forceinline__ float bias_of(const ELEMENT *bias, const Item &item,
                                             int further) const {
        const int row = item.row_tile * kRows + row0 + threadIdx.x / 32 % 4 * 16 +
                        threadIdx.x % 32 / 4 + further;
        return BIAS && row < kSetRows ? load(bias + item.set * kSetOut + row) : 0;
    }

    __device__ __forceinline__ void write(float (&total)[kSums], const Item &item, Y_TYPE *y,
                                          const Input &input, const ELEMENT *w,
                                          const ELEMENT *bias, int batch) {
        const float *factors = work.row_factors + item.set * kRowTiles * kRows +
                               item.row_tile * kRows + row0 + threadIdx.x / 32 % 4 * 16 +
                               threadIdx.x % 32 / 4;
        const float factor[2] = {factors[0], factors[8]};
        const float addend[2] = {bias_of(bias, item, 0), bias_of(bias, item, 8)};
#pragma unroll
        for (int i = 0; i < kSums; i++) total[i] = total[i] * factor[i / 2 % 2] + addend[i / 2 % 2];
        const unsigned positions = batch * kPositions;
        for_each(total, item, [&](unsigned position, int row, const float(&sums)[16]) {
            const int image = position / kPositions, inside = position % kPositions;
            const int i = inside / GRID_W, j = inside % GRID_W;
            unsigned there = 0, again = 0;  // bit r: the output has element r; it is not finite
            Y_TYPE *places[16];
            float before[16];
            const Element first(item.set, row, item.job, image, i, j);
#pragma unroll
            for (int r = 0; r < 16; r++) {
                const Element here(item.set, row + r, item.job, image, i, j);
                // Rows that are not folded are at constant distances.
                places[r] = BACKWARD && kFold > 1 ? here.place(y)
                                                  : first.place(y) + r * size_t(kOutPlane);
                there |= unsigned(here.there && position < positions) << r;
                before[r] = there >> r & 1 ? held(places[r]) : 0;
            }
#pragma unroll
            for (int r = 0; r < 16; r++) {
                again |= (isfinite(sums[r]) ? 0 : 1u << r) & there;
                if ((there & ~again) >> r & 1) store_biased(places[r], sums[r], before[r]);
            }
            for (; again; again &= again - 1) {
                const Element here(item.set, row + __ffs(again) - 1, item.job, image, i, j);
                store(here.place(y), textbook(here, input, w), bias, here.out);
            }
        });
    }
};

// Persistent blocks: each takes every gridDim.x-th item. The first four warps release their
// registers.
extern "C" __global__ void __launch_bounds__(384, 1)
    multiply_tiles(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x,
                   const ELEMENT *__restrict__ w, const ELEMENT *__restrict__ bias,
                   void *__restrict__ prepared, void *__restrict__ memory, int batch,
                   int splits CONVERT_PARAMETERS) {
    extern __shared__ __align__(128) char bytes[];
    Shared &shared = *(Shared *)bytes;
    const Workspace work(prepared, memory, batch);
    if (threadIdx.x == 0) {
        for (int i = 0; i < PIXEL_STAGES; i++) {
            barrier_init(&shared.pixels_full[i], 1);
            barrier_init(&shared.pixels_free[i], 8);
        }
        for (int i = 0; i < WEIGHT_STAGES; i++) {
            barrier_init(&shared.weights_full[i], 1);
            barrier_init(&shared.weights_free[i], 8);
        }
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) issue_copies(shared, work, splits);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
        Worker worker{shared, work, ROW_GROUPS == 2 ? group * 64 : 0,
                      ROW_GROUPS == 2 ? 0 : group * COLUMNS};
        const unsigned count = Item::count(work.tiles, splits);
        for (unsigned number = blockIdx.x; number < count; number += gridDim.x) {
            const Item item(number, work.tiles, splits);
            float total[kSums] = {};
            worker.multiply_item(total, item);
            if (splits > 1) {
                worker.keep(total, item);
            } else {
                worker.write(total, item, y, Input(x CONVERT_ARGUMENTS), w, bias, batch);
            }
        }
    }
}

// Sums of all parts of the channels, one thread for each position of a row.
extern "C" __global__ void __launch_bounds__(256)
    add_up(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, const ELEMENT *__restrict__ w,
           const ELEMENT *__restrict__ bias, void *__restrict__ prepared, void *__restrict__ memory,
           int batch, int splits CONVERT_PARAMETERS) {
    const Workspace work(prepared, memory, batch);
    const unsigned position = blockIdx.x * 256 + threadIdx.x;
    const int set = blockIdx.y / kSetRows, row = blockIdx.y % kSetRows, job = blockIdx.z;
    if (position >= batch * kPositions) return;
    const size_t columns = size_t(work.tiles) * kTile;
    const int of_all = set * kRowTiles * kRows + row;
    float sum = 0;
    for (int split = 0; split < splits; split++) {
        sum += work.sums[((size_t(split) * kJobs + job) * kAllRows + of_all) * columns + position];
    }
    const unsigned inside = position % kPositions;
    const Element element(set, row, job, position / kPositions, inside / GRID_W, inside % GRID_W);
    if (!element.there) return;
    sum *= work.row_factors[of_all];
    const Input input(x CONVERT_ARGUMENTS);
    store(element.place(y), isfinite(sum) ? sum : textbook(element, input, w), bias, element.out);
}
