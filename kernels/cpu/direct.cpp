// The fast forward pass for stride 1, no padding, dilation 1 and one group: what surrounds the
// register tile of tile.h. It is compiled once per instruction set, with ECE408_ISA its name and
// ECE408_LANES the floats in one of its vectors, and only the function at the end is not local.
//
// An image's work is a list of tiles, filter block by filter block, and within one along the flat
// output plane. Threads take whole images, or, of few images, stretches of that list.
#include "direct.h"

#include <stdlib.h>

#include "shape.h"
#include "tile.h"

namespace ece408 {
namespace {

// The output plane cut into vectors. A plane at least a vector wide is one flat run, and its last
// vector is moved back to end with the plane, so its first `first` lanes are its neighbour's. In
// a narrower plane each row is one vector with only `out_width` lanes.
struct Vectors {
    int64_t count;
    int64_t* in;
    int64_t* out;
    int* split;
    int first;  // of the last vector
    bool narrow;
};

struct Plan {
    Shape shape;
    Vectors vectors;
    float* packed;
    int64_t blocks, groups;  // of filters; of vectors
    Tile tiles[kForms][kMaxFilters + 1][kMaxVectors + 1];
    void* memory;
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `part` begins when `total` things are cut into `parts` as even as can be.
int64_t part_start(int64_t total, int64_t parts, int64_t part) { return total * part / parts; }

int64_t taps(const Shape& s) { return s.channels * s.kernel_h * s.kernel_w; }

int64_t count_vectors(const Shape& s) {
    if (s.out_width < kLanes) return s.out_height;
    return divide_up(s.out_height * s.out_width, kLanes);
}

void fill_vectors(const Shape& s, Vectors* vectors) {
    const int64_t plane = s.out_height * s.out_width;
    vectors->narrow = s.out_width < kLanes;
    vectors->first = 0;
    for (int64_t v = 0; v < vectors->count; ++v) {
        int64_t start = v * (vectors->narrow ? s.out_width : kLanes);
        if (!vectors->narrow && start + kLanes > plane) {
            vectors->first = static_cast<int>(start + kLanes - plane);
            start = plane - kLanes;
        }
        const int64_t row = start / s.out_width, column = start % s.out_width;
        const int64_t left = s.out_width - column;
        vectors->in[v] = row * s.width + column;
        vectors->out[v] = start;
        vectors->split[v] = static_cast<int>(left < kLanes ? left : kLanes);
    }
}

// Filter block after filter block: its biases, then its weights as [c][p][q][filter of block].
void pack_weights(const Plan& plan, const float* w, const float* bias) {
    const Shape& s = plan.shape;
    float* next = plan.packed;
    for (int64_t block = 0; block < plan.blocks; ++block) {
        const int64_t begin = part_start(s.filters, plan.blocks, block);
        const int64_t end = part_start(s.filters, plan.blocks, block + 1);
        for (int64_t m = begin; m < end; ++m) *next++ = bias ? bias[m] : 0.0f;
        for (int64_t tap = 0; tap < taps(s); ++tap)
            for (int64_t m = begin; m < end; ++m) *next++ = w[m * taps(s) + tap];
    }
}

void pick_tiles(Plan* plan) {
    const int64_t kernel_w = plan->shape.kernel_w;
    for (int m = 1; m <= kMaxFilters; ++m)
        for (int v = 1; v <= kMaxVectors; ++v) {
            plan->tiles[kPlain][m][v] = pick_tile<kPlain>(kernel_w, m, v);
            plan->tiles[kStraddle][m][v] = pick_tile<kStraddle>(kernel_w, m, v);
            plan->tiles[kNarrow][m][v] = pick_tile<kNarrow>(kernel_w, m, v);
        }
}

// False if there is no memory. The caller frees plan->memory.
bool make_plan(const ece408_problem& problem, const float* w, const float* bias, Plan* plan) {
    plan->shape = derive(problem);
    const Shape& s = plan->shape;
    const int64_t count = count_vectors(s);
    const size_t packed_floats = static_cast<size_t>(s.filters * (1 + taps(s)));
    const size_t per_vector = 2 * sizeof(int64_t) + sizeof(int);
    plan->memory = malloc(static_cast<size_t>(count) * per_vector + packed_floats * sizeof(float));
    if (!plan->memory) return false;
    plan->vectors.count = count;
    plan->vectors.in = static_cast<int64_t*>(plan->memory);
    plan->vectors.out = plan->vectors.in + count;
    plan->vectors.split = reinterpret_cast<int*>(plan->vectors.out + count);
    plan->packed = reinterpret_cast<float*>(plan->vectors.split + count);
    plan->blocks = divide_up(s.filters, kMaxFilters);
    plan->groups = divide_up(count, kMaxVectors);
    fill_vectors(s, &plan->vectors);
    pack_weights(*plan, w, bias);
    pick_tiles(plan);
    return true;
}

Form form_of(const Vectors& vectors, int64_t begin, int64_t end) {
    if (vectors.narrow) return kNarrow;
    for (int64_t v = begin; v < end; ++v)
        if (vectors.split[v] < kLanes) return kStraddle;
    return kPlain;
}

// Moves a tile's results from scratch to the output, only the lanes that are the tile's own.
void put(const Plan& plan, const float* scratch, float* y, int64_t filters, int64_t begin,
         int64_t end, bool accumulate) {
    const Vectors& vectors = plan.vectors;
    const int64_t plane = plan.shape.out_height * plan.shape.out_width;
    for (int64_t m = 0; m < filters; ++m)
        for (int64_t v = begin; v < end; ++v, scratch += kLanes) {
            float* to = y + m * plane + vectors.out[v];
            const int first = v == vectors.count - 1 ? vectors.first : 0;
            const int last = vectors.narrow ? vectors.split[v] : kLanes;
            for (int lane = first; lane < last; ++lane)
                to[lane] = accumulate ? to[lane] + scratch[lane] : scratch[lane];
        }
}

// Tile `index` of an image. A tile that may not simply overwrite what lies under its vectors goes
// by way of a scratch array: threads must not meet on the lanes that two vectors share.
void run_tile(const Plan& plan, const float* x, float* y, int64_t index, bool accumulate) {
    const Shape& s = plan.shape;
    const Vectors& vectors = plan.vectors;
    const int64_t block = index / plan.groups, group = index % plan.groups;
    const int64_t m = part_start(s.filters, plan.blocks, block);
    const int64_t filters = part_start(s.filters, plan.blocks, block + 1) - m;
    const int64_t begin = part_start(vectors.count, plan.groups, group);
    const int64_t end = part_start(vectors.count, plan.groups, group + 1);
    const int64_t plane = s.out_height * s.out_width;
    const Form form = form_of(vectors, begin, end);
    const Tile tile = plan.tiles[form][filters][end - begin];
    TileArgs args = {s.channels, s.height, s.width, s.kernel_h, s.kernel_w, x,
                     plan.packed + m * (1 + taps(s)), vectors.in + begin, vectors.split + begin,
                     y + m * plane, vectors.out + begin, plane};
    const bool shares_lanes = vectors.first > 0 && end == vectors.count;
    if (!accumulate && form != kNarrow && !shares_lanes) {
        tile(args);
        return;
    }
    float scratch[kMaxFilters * kMaxVectors * kLanes];
    int64_t out[kMaxVectors];
    for (int v = 0; v < kMaxVectors; ++v) out[v] = v * kLanes;
    args.y = scratch;
    args.out = out;
    args.filter_step = (end - begin) * kLanes;
    tile(args);
    put(plan, scratch, y + m * plane, filters, begin, end, accumulate);
}

// Parts to cut one image's tiles into, so that every thread has a few to take.
int64_t count_parts(int64_t batch, int64_t tiles, int threads) {
    const int64_t wanted = threads > 1 ? divide_up(4 * static_cast<int64_t>(threads), batch) : 1;
    return wanted < tiles ? wanted : tiles;
}

void run(const Plan& plan, const float* x, float* y, bool accumulate, int threads) {
    const Shape& s = plan.shape;
    const int64_t x_image = s.channels * s.height * s.width;
    const int64_t y_image = s.filters * s.out_height * s.out_width;
    const int64_t tiles = plan.blocks * plan.groups;
    const int64_t parts = count_parts(s.batch, tiles, threads);
    const int64_t units = s.batch * parts;
    const int team = static_cast<int>(threads < units ? threads : units);
#pragma omp parallel for num_threads(team) schedule(dynamic)
    for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t image = unit / parts, part = unit % parts;
        const int64_t end = part_start(tiles, parts, part + 1);
        for (int64_t index = part_start(tiles, parts, part); index < end; ++index)
            run_tile(plan, x + image * x_image, y + image * y_image, index, accumulate);
    }
}

}  // namespace

#define ECE408_JOIN(a, b) a##b
#define ECE408_NAME(prefix, isa) ECE408_JOIN(prefix, isa)

int ECE408_NAME(direct_forward_, ECE408_ISA)(const ece408_problem& problem, const float* x,
                                             const float* w, const float* bias, float* y,
                                             bool accumulate, int threads) {
    Plan plan;
    if (!make_plan(problem, w, bias, &plan)) return ECE408_NO_MEMORY;
    run(plan, x, y, accumulate, threads);
    free(plan.memory);
    return ECE408_OK;
}

}  // namespace ece408
