// Convolutions as direct.cpp has them, of kernels with three, five or more rows, by pairs of output
// rows with fewer products: row_pairs.h has the idea. It is compiled once per instruction set.
//
// Threads take stretches of an image's register tiles, all filters of them: first the domains' rows
// that they need are made, few enough to stay in cache, then each tile takes the four in turn.
#include "winograd.h"

#include <omp.h>
#include <string.h>

#include "plane.h"
#include "row_pairs.h"
#include "tile.h"

namespace ece408 {
namespace {

// The order in which a tile takes them: Z1 and Z2 go to both rows, Z3 and Z0 to one.
constexpr int kOrder[kDomains] = {1, 2, 3, 0};

// Bytes of domains that are made at a time, if that is rows enough: they share a core's cache with
// weights and outputs. (Those of two stretches have rows in common; smaller ones are no faster.)
constexpr int64_t kNearBytes = 256 << 10;
constexpr int64_t kLeastRows = 4;

struct Plan {
    Layer layer;
    RowPairs pairs;
    Tiling tiling;    // of a plane with a row for each pair
    int64_t stretch;  // tiles of a block that are taken at a time
    int64_t rows;     // that their domains have at most
    float* packed;

    int64_t domain() const { return rows * layer.shape.width; }
    // Rows of a transformed channel: its domains, and scratch to make them.
    int64_t channel_rows() const { return kDomains * rows + 5; }
    // Weights of a filter for a domain, and for all with what each of their sums starts with.
    int64_t weights(int t) const {
        const int64_t groups = pairs.groups - pairs.first_group(t);
        return layer.shape.channels * groups * layer.shape.kernel_w;
    }
    int64_t filter_floats() const {
        return kDomains + layer.shape.channels * pairs.tap_rows() * layer.shape.kernel_w;
    }
    // The first pair of tiles that begin with `tile`, and the one behind those that end before it.
    int64_t first_pair(int64_t tile) const {
        return tiling.out[tiling.first_vector(tile)] / layer.shape.out_width;
    }
    int64_t last_pair(int64_t tile) const {
        const int64_t last = tiling.out[tiling.first_vector(tile) - 1] + kLanes - 1;
        return last / layer.shape.out_width + 1;
    }
};

// As many tiles at a time as the near cache holds rows for, but several for each thread.
void choose_stretch(Plan* plan, int threads) {
    const Shape& s = plan->layer.shape;
    const Tiling& tiling = plan->tiling;
    const int64_t row_bytes =
        kDomains * s.channels * s.width * static_cast<int64_t>(sizeof(float));
    int64_t rows = kNearBytes / row_bytes - plan->pairs.groups;
    if (rows < kLeastRows) rows = kLeastRows;
    const int64_t near = rows * s.out_width / ((tiling.size + 1) * kLanes);
    const int64_t parts = count_parts(s.batch, tiling.tiles, threads);
    plan->stretch = near < tiling.tiles / parts ? near : tiling.tiles / parts;
    if (plan->stretch < 1) plan->stretch = 1;
    plan->rows = 0;
    for (int64_t tile = 0; tile < tiling.tiles; tile += plan->stretch) {
        const int64_t end = tile + plan->stretch < tiling.tiles ? tile + plan->stretch
                                                                : tiling.tiles;
        const int64_t needed =
            plan->last_pair(end) - plan->first_pair(tile) + plan->pairs.groups - 1;
        if (needed > plan->rows) plan->rows = needed;
    }
}

float group_weight(const Plan& plan, int t, int64_t m, int64_t c, int64_t g, int64_t q) {
    const Layer& layer = plan.layer;
    const float third = plan.pairs.has_third(g) ? layer.weight(m, c, 2 * g + 2, q) : 0.0f;
    return domain_weight(t, layer.weight(m, c, 2 * g, q), layer.weight(m, c, 2 * g + 1, q), third);
}

// Filter block after filter block, domain after domain in kOrder: what its sums start with, the
// biases or zeros, then its weights as [c][group][q][filter of block].
void pack_weights(const Plan& plan, const float* bias) {
    const Shape& s = plan.layer.shape;
    float* next = plan.packed;
    for (int64_t block = 0; block < plan.tiling.blocks; ++block) {
        const int64_t begin = plan.tiling.first_filter(block);
        const int64_t end = plan.tiling.first_filter(block + 1);
        for (int t : kOrder) {
            for (int64_t m = begin; m < end; ++m) *next++ = bias && t == 1 ? bias[m] : 0.0f;
            for (int64_t c = 0; c < s.channels; ++c)
                for (int64_t g = plan.pairs.first_group(t); g < plan.pairs.groups; ++g)
                    for (int64_t q = 0; q < s.kernel_w; ++q)
                        for (int64_t m = begin; m < end; ++m)
                            *next++ = group_weight(plan, t, m, c, g, q);
        }
    }
}

// Row `row` of a channel with its border, where it is: in the image, or of zeros, or in `buffer`.
const float* find_row(const Plan& plan, const float* channel, int64_t row, const float* zeros,
                      float* buffer) {
    const Layer& layer = plan.layer;
    const int64_t from = row - layer.top;
    if (from < 0 || from >= layer.height) return zeros;
    if (layer.width == layer.shape.width) return channel + from * layer.width;
    memcpy(buffer + layer.left, channel + from * layer.width,
           static_cast<size_t>(layer.width) * sizeof(float));
    return buffer;
}

// Rows [begin, end) of a channel's domains, one domain after the other, then a row of zeros and
// four with borders.
void transform(const Plan& plan, const float* channel, int64_t begin, int64_t end,
               float* domains) {
    const int64_t width = plan.layer.shape.width, step = plan.domain();
    float* rows = domains + kDomains * step;
    memset(rows, 0, static_cast<size_t>(5 * width) * sizeof(float));
    const float* d[4];
    for (int64_t start = begin; start < end; ++start, domains += width) {
        // Half of the rows are those of the start before; buffers take turns by row.
        for (int64_t r = 0; r < 4; ++r) {
            const int64_t row = 2 * start + r;
            d[r] = r < 2 && start > begin
                       ? d[r + 2]
                       : find_row(plan, channel, row, rows, rows + (1 + row % 4) * width);
        }
        // The last vector ends with the row: rows are at least a vector long.
        for (int64_t j = 0; j < width; j += kLanes) {
            const int64_t at = j + kLanes <= width ? j : width - kLanes;
            Vec z[kDomains];
            to_domains(load(d[0] + at), load(d[1] + at), load(d[2] + at), load(d[3] + at), z, 1);
            for (int t = 0; t < kDomains; ++t) store(domains + t * step + at, z[t]);
        }
    }
}

// Where the lanes of a vector go in one of a pair's two rows: [first, split) of them to `at`, and
// [split, last), which are beyond the row's end, to the next row of this kind.
struct Places {
    int64_t at;
    int first, split, last;
};

struct TileArgs {
    const StripArgs* domains;
    const Places* places[2];  // per vector, in the even and the odd rows
    float* y;                 // the first filter's output
    int64_t filter_step, row;  // floats from filter to filter, and of an output row
    bool accumulate;
};

// A register tile: the two rows' sums over all domains, the one kept while the other is summed.
struct PairTile {
    using Function = void(const TileArgs&);

    template <int MT, int VT>
    __attribute__((always_inline)) static void put(const TileArgs& args, int odd,
                                                   const Vec (&sum)[MT][VT]) {
        const Places* places = args.places[odd];
        ECE408_UNROLL
        for (int v = 0; v < VT; ++v) {
            const Places& place = places[v];
            float* to = args.y + place.at;
            ECE408_UNROLL
            for (int m = 0; m < MT; ++m, to += args.filter_step) {
                put_lanes(place.first, place.split, to, sum[m][v], args.accumulate);
                put_lanes(place.split, place.last, to + args.row, sum[m][v], args.accumulate);
            }
        }
    }

    template <int KW, int MT, int VT>
    __attribute__((always_inline)) static void add(const TileArgs& args, int domain,
                                                   Vec (&sum)[MT][VT]) {
        const StripArgs& strip = args.domains[domain];
        add_window<KW>(strip, strip.in, strip.split, sum);
    }

    template <int KW, int MT, int VT>
    __attribute__((noinline)) static void run(const TileArgs& args) {
        alignas(64) float kept[MT][VT][kLanes];
        Vec sum[MT][VT];
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            const Vec bias = broadcast(args.domains[1].packed[m]);
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) sum[m][v] = bias;
        }
        add<KW>(args, 1, sum);
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) {
                store(kept[m][v], sum[m][v]);
                sum[m][v] = broadcast(0.0f);
            }
        }
        add<KW>(args, 2, sum);
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) {
                const Vec z1 = load(kept[m][v]), z2 = sum[m][v];
                store(kept[m][v], z1 + z2);
                sum[m][v] = z1 - z2;
            }
        }
        add<KW>(args, 3, sum);
        put(args, 1, sum);
        ECE408_UNROLL
        for (int m = 0; m < MT; ++m) {
            ECE408_UNROLL
            for (int v = 0; v < VT; ++v) sum[m][v] = load(kept[m][v]);
        }
        add<KW>(args, 0, sum);
        put(args, 0, sum);
    }
};

void find_places(const Plan& plan, int64_t first_vector, int64_t vectors, int odd,
                 Places* places) {
    const Tiling& tiling = plan.tiling;
    const int64_t width = plan.layer.shape.out_width;
    const int64_t rows = (plan.layer.shape.out_height + 1 - odd) / 2;  // of this kind
    for (int64_t v = first_vector; v < first_vector + vectors; ++v) {
        const int64_t at = tiling.out[v], left = rows * width - at;
        const int last = left <= 0 ? 0 : left < kLanes ? static_cast<int>(left) : kLanes;
        const int split = tiling.split[v] < last ? tiling.split[v] : last;
        const int first = v == tiling.count - 1 ? tiling.first : 0;
        // In the output, rows of the other kind lie between.
        *places++ = {at + (at / width + odd) * width, first, first > split ? first : split, last};
    }
}

// Tiles [begin, end) of a filter block of an image, whose domains begin with pair `pair`.
void run_block(const Plan& plan, const float* image, int64_t pair, int64_t block, int64_t begin,
               int64_t end, bool accumulate, float* y) {
    const Shape& s = plan.layer.shape;
    const int64_t m = plan.tiling.first_filter(block);
    const int64_t filters = plan.tiling.first_filter(block + 1) - m;
    const float* packed = plan.packed + m * plan.filter_floats();
    StripArgs domains[kDomains];
    for (int t : kOrder) {
        const int64_t skipped = plan.pairs.first_group(t);
        const float* x = image + t * plan.domain() + (skipped - pair) * s.width;
        StripArgs& domain = domains[t];
        domain = {};
        domain.channels = s.channels, domain.height = plan.channel_rows(), domain.width = s.width;
        domain.kernel_h = plan.pairs.groups - skipped, domain.kernel_w = s.kernel_w;
        domain.x = x, domain.packed = packed;
        packed += filters * (1 + plan.weights(t));
    }
    constexpr int kMostVectors = 4;
    Places even[kMostVectors], odd[kMostVectors];
    const int64_t plane = s.out_height * s.out_width;
    const TileArgs args = {domains, {even, odd}, y + m * plane, plane, s.out_width, accumulate};
    for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = plan.tiling.first_vector(tile);
        const int64_t vectors = plan.tiling.first_vector(tile + 1) - first;
        for (StripArgs& domain : domains) {
            domain.in = plan.tiling.in + first;
            domain.split = plan.tiling.split + first;
        }
        find_places(plan, first, vectors, 0, even);
        find_places(plan, first, vectors, 1, odd);
        pick_tile<PairTile>(s.kernel_w, static_cast<int>(filters),
                            static_cast<int>(vectors))(args);
    }
}

// Tiles [begin, end) of all filter blocks of an image; `domains` is the thread's own.
void run_stretch(const Plan& plan, const float* x, int64_t begin, int64_t end, bool accumulate,
                 float* domains, float* y) {
    const Layer& layer = plan.layer;
    const Shape& s = layer.shape;
    const int64_t first = plan.first_pair(begin);
    const int64_t last = plan.last_pair(end) + plan.pairs.groups - 1;
    for (int64_t c = 0; c < s.channels; ++c)
        transform(plan, x + c * layer.height * layer.width, first, last,
                  domains + c * plan.channel_rows() * s.width);
    for (int64_t block = 0; block < plan.tiling.blocks; ++block)
        run_block(plan, domains, first, block, begin, end, accumulate, y);
}

// False if there is no memory.
bool run(const Plan& plan, const float* x, float* y, bool accumulate, int threads) {
    const Layer& layer = plan.layer;
    const Shape& s = layer.shape;
    const int64_t tiles = plan.tiling.tiles, parts = divide_up(tiles, plan.stretch);
    const int64_t units = s.batch * parts;
    const int team = static_cast<int>(threads < units ? threads : units);
    const int64_t own = s.channels * plan.channel_rows() * s.width;
    float* domains = static_cast<float*>(malloc(static_cast<size_t>(team * own) * sizeof(float)));
    if (!domains) return false;
#pragma omp parallel for schedule(dynamic) num_threads(team)
    for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t b = unit / parts, begin = unit % parts * plan.stretch;
        const int64_t end = begin + plan.stretch < tiles ? begin + plan.stretch : tiles;
        run_stretch(plan, x + b * s.channels * layer.height * layer.width, begin, end, accumulate,
                    domains + omp_get_thread_num() * own,
                    y + b * s.filters * s.out_height * s.out_width);
    }
    free(domains);
    return true;
}

int run_layer(const Layer& layer, const float* x, const float* bias, float* y, bool accumulate,
              int threads) {
    const Shape& s = layer.shape;
    Plan plan = {layer, row_pairs(s.kernel_h, s.out_height), {}, 0, 0, nullptr};
    plan.packed = static_cast<float*>(
        malloc(static_cast<size_t>(s.filters * plan.filter_floats()) * sizeof(float)));
    bool done = plan.packed &&
                make_tiling(plan.pairs.pairs, s.out_width, s.width, s.filters, &plan.tiling);
    if (done) {
        choose_stretch(&plan, threads);
        pack_weights(plan, bias);
        done = run(plan, x, y, accumulate, threads);
    }
    free(plan.tiling.in);
    free(plan.packed);
    return done ? ECE408_OK : ECE408_NO_MEMORY;
}

}  // namespace

#define ECE408_JOIN(a, b) a##b
#define ECE408_NAME(prefix, isa) ECE408_JOIN(prefix, isa)

int ECE408_NAME(winograd_forward_, ECE408_ISA)(const ece408_problem& problem, const float* x,
                                               const float* w, const float* bias, float* y,
                                               bool accumulate, int threads) {
    if (!has_row_pairs(problem.kernel_h) || !direct_suits(problem, kLanes))
        return ECE408_UNSUPPORTED;
    return run_layer(forward_layer(problem, w), x, bias, y, accumulate, threads);
}

int ECE408_NAME(winograd_backward_data_, ECE408_ISA)(const ece408_problem& problem,
                                                     const float* w, const float* dy, float* dx,
                                                     bool accumulate, int threads) {
    if (!has_row_pairs(problem.kernel_h) || !direct_suits_backward(problem, kLanes))
        return ECE408_UNSUPPORTED;
    return run_layer(backward_layer(problem, w), dy, nullptr, dx, accumulate, threads);
}

}  // namespace ece408
