// Winograd F(2,3) in two dimensions (winograd_f23.h), vectorised over columns: convolutions of
// stride 1 with kernels of 3, 5 or 7 rows and columns, with half the products or fewer. Compiled
// once per instruction set.
//
// The input transform makes 4 x 4 components of half the image's height and width; each is
// convolved with transformed weights, and the output transform makes tiles of 2x2 outputs of their
// sums. Lanes are adjacent columns of a component. Threads take bands of row pairs of an image. For
// each band they transform the input rows that it needs, few enough to stay in the cache, sum the
// products of a few filters over a run of lanes in register tiles, and write rows of y.
#include "api/kernels.h"

#include <string.h>

#include "conv/textbook.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/lanes.h"
#include "micro/plane.h"
#include "micro/winograd_tile.h"

namespace ece408 {
namespace {

// Bytes of components per band, unless that is too few rows: a core's cache also holds weights
// and sums. (Neighbouring bands have rows in common.)
constexpr int64_t kNearBytes = 384 << 10;
constexpr int64_t kLeastRows = 4;

// Channels times filters from which on threads divide the packing of weights.
constexpr int64_t kManyWeights = 1024;

// The largest kernel.
constexpr int64_t kMostSide = 7, kMostTaps = kMostSide * kMostSide;

constexpr int64_t kLineBytes = kLine * sizeof(float);

struct Plan {
    Layer layer;
    F23 rows, columns;
    int64_t pitch;       // floats from row to row of a component
    int64_t band_pairs;  // row pairs of a band
    int64_t component;   // floats of one component of a channel of a band
    int64_t sums;        // floats of a filter's sums of a band, for one of the 2x2 outputs
    int64_t blocks;      // of filters
    const float* packed;
    const float* bias;
    Textbook book;  // of the output

    int64_t first_filter(int64_t block) const {
        return part_start(layer.shape.filters, blocks, block);
    }
    int64_t most_filters() const { return divide_up(layer.shape.filters, blocks); }
    int64_t filter_floats() const {
        return 1 + layer.shape.channels * rows.taps() * columns.taps();
    }
    int64_t packed_floats() const { return layer.shape.filters * filter_floats(); }
    // Vectors for the sums of `row_pairs` row pairs, with the unused lanes between rows.
    int64_t vectors(int64_t row_pairs) const {
        return divide_up((row_pairs - 1) * pitch + columns.out_pairs, kLanes);
    }
    // Floats that are read of an image's row; a few are beyond it.
    int64_t row_span() const { return 2 * divide_up(pitch, kLanes) * kLanes + 2; }
    int64_t image_rows() const { return 2 * (band_pairs + rows.groups); }
    // Floats per thread: components, the sums of a block of filters, and rows with a border.
    int64_t component_floats() const { return kComponents * kComponents * layer.shape.channels * component; }
    int64_t sum_floats() const { return 4 * most_filters() * sums; }
    int64_t row_floats() const { return (image_rows() + 1) * row_span(); }
    int64_t scratch_floats() const {
        return divide_up(component_floats() + sum_floats() + row_floats(), kLine) * kLine;
    }
};

// The plan of a layer, without the sizes that depend on threads.
Plan plan_of(const Layer& layer, const float* bias) {
    const Shape& s = layer.shape;
    Plan plan = {};
    plan.layer = layer;
    plan.bias = bias;
    plan.rows = f23_of(s.kernel_h, s.out_height);
    plan.columns = f23_of(s.kernel_w, s.out_width);
    plan.blocks = s.filters <= kMostFilters ? 1 : divide_up(s.filters, kBlockFilters);
    return plan;
}

void choose_sizes(Plan* plan, int threads) {
    const Shape& s = plan->layer.shape;
    plan->pitch = plan->columns.starts();
    const int64_t row_bytes = kComponents * kComponents * s.channels * plan->pitch *
                              static_cast<int64_t>(sizeof(float));
    int64_t rows = kNearBytes / row_bytes - plan->rows.groups + 1;
    if (rows < kLeastRows) rows = kLeastRows;
    int64_t parts = divide_up(plan->rows.out_pairs, rows);
    const int64_t wanted = count_parts(s.batch, plan->rows.out_pairs, threads);
    // More parts than threads pay while they fill tiles.
    const auto fills = [&](int64_t number) {
        const int64_t vectors = plan->vectors(divide_up(plan->rows.out_pairs, number));
        return vectors >= tile_vectors(static_cast<int>(kBlockFilters));
    };
    while (parts < wanted && (s.batch * parts < threads || fills(parts + 1))) ++parts;
    plan->band_pairs = divide_up(plan->rows.out_pairs, parts);
    // An odd number of lines, so that the components of one pixel do not compete for a few sets of
    // the cache. A vector may begin with the last used lane.
    const int64_t floats = (plan->band_pairs + plan->rows.groups - 1) * plan->pitch + kLanes;
    plan->component = (divide_up(floats, kLine) | 1) * kLine;
    plan->sums = (plan->vectors(plan->band_pairs) + 1) * kLanes;
}

static_assert(kMostFilters <= 8, "weights are packed in 8 lanes at most");

// A number for each filter of a block, and unused lanes.
template <int LANES>
struct Each {
    double of[LANES];
};

// Transforms the weights of a group of taps, `step` apart; the third tap may be zero.
template <int LANES>
void transform_group(const F23& f23, int64_t group, const Each<LANES>* taps, int64_t step,
                     Each<LANES> (&out)[kComponents]) {
    static constexpr Each<LANES> zeros = {};
    const Each<LANES>* g = taps + 2 * group * step;
    const Each<LANES>& third = f23.has_third(group) ? g[2 * step] : zeros;
    for (int m = 0; m < LANES; ++m)
        for (int t = 0; t < kComponents; ++t)
            out[t].of[m] = transform_weight(t, g[0].of[m], g[step].of[m], third.of[m]);
}

// Packs the transformed weights of a block's `filters` filters for a channel. `next`: for each row
// component and set of column components, where the tile reads them next; advanced. SIDE: kernel
// height and width, or 0 for any.
template <int LANES, int SIDE>
void pack_channel(const Plan& plan, int64_t first, int64_t filters, int64_t c,
                  float* (&next)[kComponents][2]) {
    const Shape& s = plan.layer.shape;
    const int64_t kernel_h = SIDE ? SIDE : s.kernel_h, kernel_w = SIDE ? SIDE : s.kernel_w;
    const F23 rows = f23_of(kernel_h, 1), columns = f23_of(kernel_w, 1);
    Each<LANES> taps[kMostTaps], half[kComponents][kMostSide], all[kComponents];
    for (int m = 0; m < LANES; ++m) {
        // Lanes beyond the filters are not stored.
        const float* from = plan.layer.taps(first + (m < filters ? m : 0), c);
        const int64_t step = plan.layer.rotated ? -1 : 1;
        for (int64_t t = 0; t < kernel_h * kernel_w; ++t) taps[t].of[m] = from[t * step];
    }
    for (int64_t gr = 0; gr < rows.groups; ++gr) {
        for (int64_t q = 0; q < kernel_w; ++q) {
            transform_group(rows, gr, taps + q, kernel_w, all);
            for (int t = 0; t < kComponents; ++t) half[t][q] = all[t];
        }
        for (int tr = 0; tr < kComponents; ++tr)
            for (int64_t gc = 0; gr >= rows.first_group(tr) && gc < columns.groups;
                 ++gc) {
                transform_group(columns, gc, half[tr], 1, all);
                for (int set = 0; set < 2; ++set)
                    for (int tc : kColumnComponents[set]) {
                        if (gc < columns.first_group(tc)) continue;
                        for (int64_t m = 0; m < filters; ++m)
                            next[tr][set][m] = static_cast<float>(all[tc].of[m]);
                        next[tr][set] += filters;
                    }
            }
    }
}

// Packs block by block of filters: biases or zeros, then for each row component, in
// kComponentOrder, the column components of both outputs and those of one output, as [c][group of
// rows][group of columns][column component][filter of block].
void pack_weights(const Plan& plan, float* packed, int threads) {
    const int64_t channels = plan.layer.shape.channels, groups = plan.columns.groups;
    const bool many = channels * plan.layer.shape.filters >= kManyWeights;
    const bool of_three = plan.rows.kernel == 3 && plan.columns.kernel == 3;
    parallel_for(many ? threads : 1, plan.blocks, [&](int64_t block, int) {
        const int64_t first = plan.first_filter(block);
        const int64_t filters = plan.first_filter(block + 1) - first;
        float* at = packed + first * plan.filter_floats();
        for (int64_t m = 0; m < filters; ++m) *at++ = plan.bias ? plan.bias[first + m] : 0.0f;
        float* next[kComponents][2];
        for (int tr : kComponentOrder) {
            const int64_t rows = plan.rows.groups - plan.rows.first_group(tr);
            next[tr][0] = at;
            next[tr][1] = at += channels * rows * 2 * groups * filters;
            at += channels * rows * (groups + 1) * filters;
        }
        const auto pack = filters > 4 ? pack_channel<8, 0> : of_three ? pack_channel<4, 3>
                                                                     : pack_channel<4, 0>;
        for (int64_t c = 0; c < channels; ++c) pack(plan, first, filters, c, next);
    });
}

// Row `row` of a channel with its border: in place if x has row_span() floats from there on,
// otherwise copied to `buffer`.
const float* find_row(const Plan& plan, const float* channel, int64_t row, const float* x_end,
                      const float* zeros, float* buffer) {
    const Layer& layer = plan.layer;
    const int64_t from = row - layer.top;
    if (from < 0 || from >= layer.height) return zeros;
    const float* found = channel + from * layer.width;
    if (layer.width == layer.shape.width && x_end - found >= plan.row_span()) return found;
    memcpy(buffer + layer.left, found, static_cast<size_t>(layer.width) * sizeof(float));
    return buffer;
}

// Input transform of a row's columns, from column 2j on.
inline void transform_columns(const float* row, int64_t j, Vec (&out)[kComponents]) {
    const float* d = row + 2 * j;
    const Vec first = load(d), second = load(d + kLanes);
    const Vec next_first = load(d + 2), next_second = load(d + 2 + kLanes);
    transform_input(even_lanes(first, second), odd_lanes(first, second),
                    even_lanes(next_first, next_second), odd_lanes(next_first, next_second), out, 1);
}

// Input transform of a channel, from the image's rows.
void transform_rows(const Plan& plan, const float* const* rows, int64_t starts, float* components) {
    const int64_t step = plan.layer.shape.channels * kComponents * plan.component;
    for (int64_t j = 0; j < plan.pitch; j += kLanes) {
        // The last vector ends with the row, to leave the beginning of the next row alone; shorter
        // rows are written in order.
        int64_t at = j;
        if (at > 0 && at + kLanes > plan.pitch) at = plan.pitch - kLanes;
        Vec d[4][kComponents];
        transform_columns(rows[0], at, d[2]);
        transform_columns(rows[1], at, d[3]);
        float* to = components + at;
        for (int64_t start = 0; start < starts; ++start, to += plan.pitch) {
            ECE408_UNROLL
            for (int t = 0; t < kComponents; ++t) d[0][t] = d[2][t], d[1][t] = d[3][t];
            transform_columns(rows[2 * start + 2], at, d[2]);
            transform_columns(rows[2 * start + 3], at, d[3]);
            ECE408_UNROLL
            for (int t = 0; t < kComponents; ++t) {
                Vec z[kComponents];
                transform_input(d[0][t], d[1][t], d[2][t], d[3][t], z, 1);
                ECE408_UNROLL
                for (int r = 0; r < kComponents; ++r) store(to + r * step + t * plan.component, z[r]);
            }
        }
    }
}

// Computes a filter's non-finite sums again by the textbook loop: differences of pixels or weights
// may be infinite or NaN where the sum of products is not.
void recompute_nonfinite_rows(const Plan& plan, int64_t filter, float* sums, int64_t rows, const float* y) {
    const int64_t width = plan.layer.shape.out_width;
    const double first = plan.bias ? plan.bias[filter] : 0;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t j = 0; j < width; ++j, ++y) {
            float* sum = sums + (row % 2 * 2 + j % 2) * plan.sums + row / 2 * plan.pitch + j / 2;
            if (!is_finite(*sum)) *sum = static_cast<float>(plan.book.at(y) + first);
        }
}

// Writes a filter's sums to `rows` rows of y. Adds each sum times zero to `rest`, which stays zero
// if all are finite.
void put_rows(const Plan& plan, const float* sums, int64_t rows, bool accumulate, float* y,
              Vec (&rest)[2]) {
    const int64_t width = plan.layer.shape.out_width;
    const float* const end = y + rows * width;
    const auto put = [&](float* to, int64_t left, Vec v) {
        // The next row overwrites what is beyond this row's end.
        if (!accumulate && end - to >= kLanes)
            store(to, v);
        else
            put_lanes(0, left < kLanes ? static_cast<int>(left) : kLanes, to, v, accumulate);
    };
    for (int64_t row = 0; row < rows; ++row, y += width) {
        const float* even = sums + row / 2 * plan.pitch + row % 2 * 2 * plan.sums;
        const float* odd = even + plan.sums;
        for (int64_t j = 0; j < width; j += 2 * kLanes, even += kLanes, odd += kLanes) {
            const Vec e = load(even), o = load(odd);
            rest[0] = multiply_add(e, broadcast(0.0f), rest[0]);
            rest[1] = multiply_add(o, broadcast(0.0f), rest[1]);
            put(y + j, width - j, interleave_first(e, o));
            if (width - j > kLanes)
                put(y + j + kLanes, width - j - kLanes, interleave_second(e, o));
        }
    }
}

// Writes the sums of a block of filters to `rows` rows of y. Sums that overwrite y are checked
// while they are written, and written again if one is not finite. Sums that are accumulated are
// checked first.
void put_block(const Plan& plan, int64_t block, float* sums, int64_t rows, bool accumulate,
               float* y) {
    const Shape& s = plan.layer.shape;
    const int64_t first = plan.first_filter(block), end = plan.first_filter(block + 1);
    const auto put = [&](bool finite) {
        Vec rest[2] = {broadcast(0.0f), broadcast(0.0f)};
        for (int64_t m = first; m < end; ++m) {
            float* const own = sums + 4 * (m - first) * plan.sums;
            float* const to = y + m * s.out_height * s.out_width;
            if (!finite) recompute_nonfinite_rows(plan, m, own, rows, to);
            put_rows(plan, own, rows, accumulate, to, rest);
        }
        float lanes[kLanes];
        store(lanes, rest[0] + rest[1]);
        return all_finite(lanes, kLanes);
    };
    if (accumulate)
        put(all_finite(sums, 4 * (end - first) * plan.sums));
    else if (!put(true))
        put(false);
}

// Scratch of one thread.
struct Scratch {
    float *components, *sums, *rows;
    const float** found;
};

// Scratch of all threads. Zeros for borders, and because unused lanes are computed as well.
struct Scratches {
    int64_t step;  // bytes
    Buffer<char> memory;

    Scratches(const Plan& plan, int threads)
        : step(round_up(plan.scratch_floats() * static_cast<int64_t>(sizeof(float)) +
                            plan.image_rows() * static_cast<int64_t>(sizeof(float*)),
                        kLineBytes)),
          memory(parallel_zeros<char>(threads, threads * step)) {}
    Scratch of(const Plan& plan, int thread) const {
        float* components = reinterpret_cast<float*>(memory + thread * step);
        float* sums = components + plan.component_floats();
        float* rows = sums + plan.sum_floats();
        return {components, sums, rows,
                reinterpret_cast<const float**>(components + plan.scratch_floats())};
    }
};

void make_components(const Plan& plan, const float* image, const float* x_end, int64_t row_pair,
                     int64_t row_pairs, const Scratch& scratch) {
    const Layer& layer = plan.layer;
    const int64_t starts = row_pairs + plan.rows.groups - 1;
    const float* zeros = scratch.rows + plan.image_rows() * plan.row_span();
    for (int64_t c = 0; c < layer.shape.channels; ++c) {
        const float* channel = image + c * layer.height * layer.width;
        for (int64_t r = 0; r < 2 * starts + 2; ++r)
            scratch.found[r] = find_row(plan, channel, 2 * row_pair + r, x_end, zeros,
                                        scratch.rows + r * plan.row_span());
        transform_rows(plan, scratch.found, starts,
                       scratch.components + c * kComponents * plan.component);
    }
}

// Prefetches part `part` of `parts` of an array; addresses without memory do no harm.
template <bool WRITE>
void prefetch_part(const float* memory, int64_t floats, int64_t parts, int64_t part) {
    const float* const end = memory + part_start(floats, parts, part + 1);
    for (const float* line = memory + part_start(floats, parts, part); line < end; line += kLine)
        __builtin_prefetch(line, WRITE, 2);
}

// Computes row pairs [row_pair, row_pair + row_pairs) of an image. Each tile prefetches a part of
// the image at `ahead`, unless null, and of the outputs of the next block of filters.
void run_band(const Plan& plan, const float* image, const float* x_end, int64_t row_pair,
              int64_t row_pairs, const float* ahead, bool accumulate, const Scratch& scratch,
              float* y) {
    const Layer& layer = plan.layer;
    const Shape& s = layer.shape;
    make_components(plan, image, x_end, row_pair, row_pairs, scratch);
    const int64_t vectors = plan.vectors(row_pairs), plane = s.out_height * s.out_width;
    const int64_t left = s.out_height - 2 * row_pair, rows = left < 2 * row_pairs ? left : 2 * row_pairs;
    WinogradTileArgs args = {s.channels, plan.component, plan.pitch, plan.rows.groups,
                     nullptr,    nullptr,     nullptr,    plan.sums};
    y += 2 * row_pair * s.out_width;
    for (int64_t block = 0; block < plan.blocks; ++block) {
        const int64_t first = plan.first_filter(block);
        const int64_t filters = plan.first_filter(block + 1) - first;
        args.packed = plan.packed + first * plan.filter_floats();
        const int64_t tiles = divide_up(vectors, tile_vectors(static_cast<int>(filters)));
        for (int64_t tile = 0; tile < tiles; ++tile) {
            if (ahead)
                prefetch_part<false>(ahead, s.channels * layer.height * layer.width,
                                     plan.blocks * tiles, block * tiles + tile);
            for (int64_t m = filters; m < 2 * filters; ++m)
                prefetch_part<true>(y + (first + m) * plane, rows * s.out_width, tiles, tile);
            const int64_t begin = part_start(vectors, tiles, tile);
            const int64_t end = part_start(vectors, tiles, tile + 1);
            args.x = scratch.components + begin * kLanes;
            args.y = scratch.sums + begin * kLanes;
            pick_tile(plan.columns.groups, filters, end - begin)(args);
        }
        put_block(plan, block, scratch.sums, rows, accumulate, y);
    }
}

// False without memory.
bool run(const Plan& plan, const float* x, float* y, bool accumulate, int threads) {
    const Layer& layer = plan.layer;
    const Shape& s = layer.shape;
    const int64_t parts = divide_up(plan.rows.out_pairs, plan.band_pairs), units = s.batch * parts;
    const int used_threads = static_cast<int>(threads < units ? threads : units);
    const int64_t image = s.channels * layer.height * layer.width;
    const float* const x_end = x + s.batch * image;
    const Scratches scratches(plan, used_threads);
    if (!scratches.memory) return false;
    parallel_for_ranges(used_threads, units, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t b = unit / parts, row_pair = unit % parts * plan.band_pairs;
            const int64_t left = plan.rows.out_pairs - row_pair;
            const float* const from = x + b * image;
            run_band(plan, from, x_end, row_pair, left < plan.band_pairs ? left : plan.band_pairs,
                     parts == 1 && unit + 1 < end ? from + image : nullptr, accumulate,
                     scratches.of(plan, thread),
                     y + b * s.filters * s.out_height * s.out_width);
        }
    });
    return true;
}

// `packed`: the layer's packed weights, or null.
int run_layer(const Layer& layer, const Textbook& book, const float* x, const float* bias,
              const float* packed, float* y, bool accumulate, int threads) {
    Plan plan = plan_of(layer, bias);
    plan.book = book;
    choose_sizes(&plan, threads);
    Buffer<float> own;
    if (!packed) {
        own = Buffer<float>(plan.packed_floats());
        if (!own) return ECE408_NO_MEMORY;
        pack_weights(plan, own, threads);
    }
    plan.packed = packed ? packed : own;
    return run(plan, x, y, accumulate, threads) ? ECE408_OK : ECE408_NO_MEMORY;
}

int run_forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                const float* packed, float* y, bool accumulate, int threads) {
    const Textbook book = {derive(problem), x, w, y, forward_element<float>};
    return run_layer(forward_layer(problem, w), book, x, bias, packed, y, accumulate, threads);
}

int forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
            float* y, bool accumulate, int threads) {
    return run_forward(problem, x, w, bias, nullptr, y, accumulate, threads);
}

int64_t packed_floats(const ece408_problem& problem) {
    return plan_of(forward_layer(problem, nullptr), nullptr).packed_floats();
}

int pack(const ece408_problem& problem, const float* w, const float* bias, float* packed,
         int threads) {
    pack_weights(plan_of(forward_layer(problem, w), bias), packed, threads);
    return ECE408_OK;
}

int forward_packed(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                   const float* packed, const ece408_epilogue& epilogue, float* y, int threads) {
    if (epilogue.factors) return ECE408_UNSUPPORTED;
    return run_forward(problem, x, w, bias, packed, y, false, threads);
}

int backward_data(const ece408_problem& problem, const float* w, const float* dy, float* dx,
                  bool accumulate, int threads) {
    const Textbook book = {derive(problem), w, dy, dx, data_element<float>};
    return run_layer(backward_layer(problem, w), book, dy, nullptr, nullptr, dx, accumulate, threads);
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(winograd) = {
    {forward, backward_data, nullptr}, {}, {}, packed_floats, pack, forward_packed};

}  // namespace ece408
