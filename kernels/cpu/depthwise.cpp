// Depthwise convolutions: every output plane is of one input plane, with a small square kernel of
// its own. Forward, the gradient for x, and, of small planes, for w. It is compiled once per
// instruction set, with ECE408_ISA its name and ECE408_LANES the floats in one of its vectors, and only
// the constant at the end is not local.
//
// There are so few products that what counts is to touch every pixel once. A register tile is a
// few output rows by one vector of columns: each vector of an input row is loaded once for all
// output rows that it meets, and nothing is copied. Lanes that would be in the border are left out
// of the loads, rows in the border are a row of zeros; both are multiplied, so that other kernels
// compute with weights that are not all finite. With stride 2 two vectors are loaded and parted into
// even and odd pixels, which are two taps. With dilation the rows of a tile lie as far apart as the
// taps do. Threads take planes, or, of few planes, parts of them. Where the arrays exceed the
// caches, a tile asks for the rows of the one below it, and outputs go past the caches if their rows
// are whole lines.
//
// Such a tile has more weights and sums than 16 registers hold. There, while the arrays are in the
// caches, kernels of 3x3 go down a column of vectors instead, with the sums of three rows at a time.
//
// An output is its bias and then its products, row by row of the kernel, whichever tile computes
// it. The gradient for x of stride 1 is such a convolution of dy with the kernel turned round. Of stride
// 2, even and odd rows and columns of x have taps of their own: a tile is two rows by two vectors of
// columns, which are interleaved, and no zeros between the pixels of dy are multiplied.
#include "kernels.h"

#include "buffer.h"
#include "depthwise_weight.h"
#include "finish.h"
#include "lanes.h"
#include "shape.h"
#include "team.h"
#include "vector.h"

namespace ece408 {
namespace {

// Output rows of a tile.
constexpr int kMostRows = ECE408_LANES == 4 ? 6 : 8;
constexpr int kMostTaps = 25;

// A convolution of planes: the problem's, or the gradient for x as one.
struct Layer {
    Shape shape;
    int64_t top, left;  // its border; may be negative
    const float* weights;
    bool turned;

    int64_t planes() const { return shape.batch * shape.filters; }
    int64_t source(int64_t plane) const { return plane / shape.group_filters; }
};

// One tile of rows, all columns of it. Rows are `apart` from each other in the output, and so are
// those of the input with stride 1.
struct Tile {
    const float* row[2 * kMostRows + 4];  // of the input: those that the windows meet
    int64_t width, left, dilate, out_width, apart;
    const float* weights;  // row by row
    float bias;
    ece408_finish finish;  // from the plane's filter on; without factors: nothing
    float* y;
    bool accumulate;
    bool overwritten;     // what goes beyond a row's end is written again: rows follow each other
    bool streams;         // past the caches: every vector is a line
    const float* ahead;   // what is read after this tile,
    int64_t ahead_lines;  // and how many of its cache lines each vector of columns prefetches
};

// A vector of pixels from column `at` on. Those outside of the row are zeros, unless `Inside`.
template <bool Inside>
__attribute__((always_inline)) inline Vec pixels(const float* row, int64_t at, Mask inside) {
    return Inside ? load(row + at) : load_only(inside, row + at);
}

inline int clamp_lane(int64_t lane) {
    return static_cast<int>(lane < 0 ? 0 : lane > kLanes ? kLanes : lane);
}

// Which lanes of a vector from column `at` on are in a row.
inline Mask lanes_in(int64_t width, int64_t at) {
    return lanes_between(clamp_lane(-at), clamp_lane(width - at));
}

// The vectors that K taps of a row are made of: of stride 1 one for each tap; of stride 2 two for
// each pair of taps.
template <int K, int S>
constexpr int kLoads = S == 1 ? K : K + 1;

template <int S>
inline int64_t load_column(int load, int64_t dilate) {
    return S == 1 ? load * dilate : load / 2 * 2 + load % 2 * kLanes;
}

template <int K, int S, bool Inside>
__attribute__((always_inline)) inline void load_taps(const float* row, int64_t at, int64_t dilate,
                                                     const Mask (&inside)[kLoads<K, S>],
                                                     Vec (&tap)[K]) {
    if constexpr (S == 1) {
        ECE408_UNROLL
        for (int q = 0; q < K; ++q) tap[q] = pixels<Inside>(row, at + q * dilate, inside[q]);
    } else {
        ECE408_UNROLL
        for (int q = 0; q < K; q += 2) {
            const Vec first = pixels<Inside>(row, at + q, inside[q]);
            const Vec second = pixels<Inside>(row, at + q + kLanes, inside[q + 1]);
            tap[q] = even_lanes(first, second);
            if (q + 1 < K) tap[q + 1] = odd_lanes(first, second);
        }
    }
}

// Which columns a vector of outputs has: whose windows are inside of the rows; of a row's beginning or
// end; of its end, fewer than a vector.
enum Columns { kInside, kBorder, kTail };

// A vector of outputs of each of R rows, from column j on.
template <int K, int S, int R, Columns C>
__attribute__((always_inline)) inline void run_columns(const Tile& t, const Vec (&weight)[K * K],
                                                       int64_t j) {
    const int64_t at = j * S - t.left;
    Mask inside[kLoads<K, S>];
    if constexpr (C != kInside) {
        ECE408_UNROLL
        for (int n = 0; n < kLoads<K, S>; ++n)
            inside[n] = lanes_in(t.width, at + load_column<S>(n, t.dilate));
    }
    Vec sum[R];
    ECE408_UNROLL
    for (int r = 0; r < R; ++r) sum[r] = broadcast(t.bias);
    ECE408_UNROLL
    for (int h = 0; h < (R - 1) * S + K; ++h) {
        Vec tap[K];
        load_taps<K, S, C == kInside>(t.row[h], at, t.dilate, inside, tap);
        ECE408_UNROLL
        for (int r = 0; r < R; ++r) {
            const int p = h - r * S;
            if (p < 0 || p >= K) continue;
            ECE408_UNROLL
            for (int q = 0; q < K; ++q)
                sum[r] = multiply_add(tap[q], weight[p * K + q], sum[r]);
        }
    }
    if (t.finish.factors) {
        const Finish finish(t.finish);
        ECE408_UNROLL
        for (int r = 0; r < R; ++r) sum[r] = finish(0, 0, sum[r]);
    }
#if ECE408_STREAMS
    if (t.streams) {
        ECE408_UNROLL
        for (int r = 0; r < R; ++r) stream(t.y + r * t.apart + j, sum[r]);
        return;
    }
#endif
    const int last = C == kTail ? clamp_lane(t.out_width - j) : kLanes;
    ECE408_UNROLL
    for (int r = 0; r < R; ++r) {
        float* const to = t.y + r * t.apart + j;
        if (C == kTail && t.overwritten && r * t.apart + j + kLanes <= R * t.apart)
            store(to, sum[r]);
        else
            put_lanes(0, last, to, sum[r], t.accumulate);
    }
}

template <int K, int S, int R>
__attribute__((noinline)) void run_tile(const Tile& t) {
    Vec weight[K * K];
    ECE408_UNROLL
    for (int k = 0; k < K * K; ++k) weight[k] = broadcast(t.weights[k]);
    // Columns that the loads of a vector of outputs reach beyond its first one.
    const int64_t reach = load_column<S>(kLoads<K, S> - 1, t.dilate) + kLanes;
    const auto ask_ahead = [&](int64_t j) {
        for (int64_t i = 0; i < t.ahead_lines; ++i)
            prefetch(t.ahead + (j / kLanes * t.ahead_lines + i) * kLine);
    };
    // The end first: what goes beyond it, where the next row begins, is written again.
    const int64_t whole = t.out_width / kLanes * kLanes;
    if (whole < t.out_width) {
        ask_ahead(whole);
        run_columns<K, S, R, kTail>(t, weight, whole);
    }
    for (int64_t j = 0; j < whole; j += kLanes) {
        const int64_t at = j * S - t.left;
        ask_ahead(j);
        if (at >= 0 && at + reach <= t.width)
            run_columns<K, S, R, kInside>(t, weight, j);
        else
            run_columns<K, S, R, kBorder>(t, weight, j);
    }
}

using RunTile = void(const Tile&);

template <int K, int S, int R = kMostRows>
RunTile* pick_rows(int64_t rows) {
    if constexpr (R > 1) {
        if (rows < R) return pick_rows<K, S, R - 1>(rows);
    }
    return run_tile<K, S, R>;
}

RunTile* pick_tile(int64_t kernel, int64_t stride, int64_t rows) {
    if (kernel == 3) return stride == 1 ? pick_rows<3, 1>(rows) : pick_rows<3, 2>(rows);
    return stride == 1 ? pick_rows<5, 1>(rows) : pick_rows<5, 2>(rows);
}

// What is the same for all tiles of a call.
struct Call {
    Layer layer;
    const float* x;
    const float* bias;
    ece408_finish finish;
    float* y;
    bool accumulate;
    const float* zeros;  // a row
    int64_t classes;     // of rows that lie dilate_h apart
    int64_t tiles;       // of a class
    bool streams;        // outputs past the caches
    bool fetches;        // tiles ask for the next one's rows
    bool goes_down;      // planes are taken in bands
};

// `count` rows from row `first` of a plane on.
void run_rows(const Call& call, const float* image, int64_t first, int64_t count, float* y,
              Tile* t) {
    const Layer& layer = call.layer;
    const Shape& s = layer.shape;
    int64_t from = first * s.stride_h - layer.top;
    for (int64_t h = 0; h < (count - 1) * s.stride_h + s.kernel_h; ++h, from += s.dilate_h)
        t->row[h] = from >= 0 && from < s.height ? image + from * s.width : call.zeros;
    t->y = y + first * s.out_width;
    t->ahead = image + from * s.width;
    t->ahead_lines = 0;
    if (call.fetches) {
        const int64_t lines = divide_up(count * s.stride_h * s.width, kLine);
        t->ahead_lines = divide_up(lines, divide_up(s.out_width, kLanes));
    }
    pick_tile(s.kernel_h, s.stride_h, count)(*t);
}

// ---- 3x3 kernels down the columns, a few rows of outputs at a time

constexpr bool kGoesDown = kLanes <= 8;
constexpr int64_t kBandRows = 16;

// Bytes of an array, for each thread, that stay in a core's own caches. Rows beyond them are fetched ahead
// where planes are not taken in bands.
constexpr int64_t kOwnCache = int64_t{2} << 20;

// Rows [first, end) of an output plane that is otherwise a tile. What `finish.h` does to outputs is
// done with numbers that lie here: through the tile's pointers it took an eighth more time.
struct Band {
    const Tile& plane;
    const float* image;
    int64_t height, top, first, end;
    bool finishes;
    float factor, addend, lowest, highest;
};

// Stores the sums of a vector of row `r` at `to`, column j.
template <Columns C>
__attribute__((always_inline)) inline void put(const Band& b, int64_t r, int64_t j, float* to,
                                               Vec sum) {
    const Tile& t = b.plane;
    if (b.finishes)
        sum = bounded(multiply_add(sum, broadcast(b.factor), broadcast(b.addend)),
                      broadcast(b.lowest), broadcast(b.highest));
    if (C != kTail)
        put_lanes(0, kLanes, to, sum, t.accumulate);
    else if (!t.accumulate && (b.end - r) * t.out_width - j >= kLanes)
        store(to, sum);  // what goes beyond the row's end is written again with the next rows
    else
        put_lanes(0, clamp_lane(t.out_width - j), to, sum, t.accumulate);
}

// N vectors of each row, from column j on.
template <int S, Columns C, int N>
__attribute__((noinline)) void run_down(const Band& b, int64_t j) {
    const Tile& t = b.plane;
    Vec weight[9];
    ECE408_UNROLL
    for (int k = 0; k < 9; ++k) weight[k] = broadcast(t.weights[k]);
    const int64_t at = j * S - t.left;
    Mask inside[N][kLoads<3, S>];
    if constexpr (C != kInside) {
        ECE408_UNROLL
        for (int v = 0; v < N; ++v) {
            ECE408_UNROLL
            for (int n = 0; n < kLoads<3, S>; ++n)
                inside[v][n] = lanes_in(t.width, at + v * S * kLanes + load_column<S>(n, 1));
        }
    }
    const Vec bias = broadcast(t.bias);
    // Sums of three rows, the first of which lacks only the last row of its windows; with a stride of
    // two rows there are no sums between the first and the last.
    Vec first[N], second[N], third[N];
    ECE408_UNROLL
    for (int v = 0; v < N; ++v) first[v] = second[v] = bias;
    const int64_t begin = b.first - (S == 1 ? 2 : 1);
    int64_t from = begin * S - b.top + 2;
    const float* row = b.image + from * t.width + at;
    float* to = t.y + begin * t.out_width + j;
    for (int64_t r = begin; r < b.end; ++r, from += S, row += S * t.width, to += t.out_width) {
        const bool there = from >= 0 && from < b.height;
        ECE408_UNROLL
        for (int v = 0; v < N; ++v) {
            third[v] = bias;
            if (!there) continue;
            Vec tap[3];
            load_taps<3, S, C == kInside>(row, v * S * kLanes, 1, inside[v], tap);
            ECE408_UNROLL
            for (int q = 0; q < 3; ++q) {
                first[v] = multiply_add(tap[q], weight[6 + q], first[v]);
                if (S == 1) second[v] = multiply_add(tap[q], weight[3 + q], second[v]);
                third[v] = multiply_add(tap[q], weight[q], third[v]);
            }
        }
        if (r >= b.first) {
            ECE408_UNROLL
            for (int v = 0; v < N; ++v) put<C>(b, r, j, to + v * kLanes, first[v]);
        }
        if (S == 2 && from + 1 >= 0 && from + 1 < b.height) {
            ECE408_UNROLL
            for (int v = 0; v < N; ++v) {
                Vec tap[3];
                load_taps<3, S, C == kInside>(row + t.width, v * S * kLanes, 1, inside[v], tap);
                ECE408_UNROLL
                for (int q = 0; q < 3; ++q)
                    third[v] = multiply_add(tap[q], weight[3 + q], third[v]);
            }
        }
        ECE408_UNROLL
        for (int v = 0; v < N; ++v) {
            first[v] = S == 1 ? second[v] : third[v];
            second[v] = third[v];
        }
    }
}

template <int S>
void run_band(const Band& b) {
    const Tile& t = b.plane;
    const int64_t whole = t.out_width / kLanes * kLanes;
    const int64_t reach = load_column<S>(kLoads<3, S> - 1, 1) + kLanes;
    const auto is_inside = [&](int64_t j) {
        return j * S >= t.left && j * S - t.left + reach <= t.width;
    };
    // The end first, as above. Two vectors together wait less for their own sums.
    if (whole < t.out_width) run_down<S, kTail, 1>(b, whole);
    for (int64_t j = 0; j < whole;) {
        const bool two = j + 2 * kLanes <= whole && is_inside(j) && is_inside(j + kLanes);
        if (two)
            run_down<S, kInside, 2>(b, j);
        else if (is_inside(j))
            run_down<S, kInside, 1>(b, j);
        else
            run_down<S, kBorder, 1>(b, j);
        j += (two ? 2 : 1) * kLanes;
    }
}

// Tiles [begin, end) of an output plane.
void run_bands(const Layer& layer, const float* image, const Tile& plane, int64_t begin,
               int64_t end) {
    const Shape& s = layer.shape;
    const int64_t rows = end * kMostRows, last = rows < s.out_height ? rows : s.out_height;
    const ece408_finish& finish = plane.finish;
    const bool finishes = finish.factors != nullptr;
    for (int64_t r = begin * kMostRows; r < last; r += kBandRows) {
        const int64_t next = r + kBandRows < last ? r + kBandRows : last;
        const Band band = {plane, image, s.height, layer.top, r, next, finishes,
                           finishes ? *finish.factors : 1, finishes ? *finish.addends : 0,
                           finish.lowest, finish.highest};
        s.stride_h == 1 ? run_band<1>(band) : run_band<2>(band);
    }
}

// Tiles [begin, end) of every class of rows of an output plane.
void run_plane(const Call& call, int64_t plane, int64_t begin, int64_t end) {
    const Layer& layer = call.layer;
    const Shape& s = layer.shape;
    const int64_t filter = plane % s.filters, window = s.kernel_h * s.kernel_w;
    const float* image = call.x + layer.source(plane) * s.height * s.width;
    float* y = call.y + plane * s.out_height * s.out_width;
    float turned[kMostTaps];
    Tile t;
    t.width = s.width, t.left = layer.left, t.dilate = s.dilate_w;
    t.out_width = s.out_width, t.apart = s.dilate_h * s.out_width;
    t.weights = layer.weights + filter * window;
    if (layer.turned) {
        for (int64_t k = 0; k < window; ++k) turned[k] = t.weights[window - 1 - k];
        t.weights = turned;
    }
    t.bias = call.bias ? call.bias[filter] : 0.0f;
    t.finish = finish_from(call.finish, filter, 0);
    t.accumulate = call.accumulate;
    t.overwritten = !call.accumulate && s.dilate_h == 1;
    t.streams = call.streams;
    t.y = y;
    if (call.goes_down) return run_bands(layer, image, t, begin, end);
    for (int64_t row = 0; row < call.classes; ++row)
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t first = row + tile * kMostRows * s.dilate_h;
            const int64_t left = divide_up(s.out_height - first, s.dilate_h);
            if (left > 0) run_rows(call, image, first, left < kMostRows ? left : kMostRows, y, &t);
        }
}

int run_layer(const Layer& layer, const float* x, const float* bias, const ece408_finish& finish,
              float* y, bool accumulate, int threads) {
    const Shape& s = layer.shape;
    const auto zeros = shared_zeros<float>(1, s.width);
    if (!zeros) return ECE408_NO_MEMORY;
    const int64_t dilate = s.dilate_h;
    const int64_t classes = dilate < s.out_height ? dilate : s.out_height;
    const int64_t tiles = divide_up(divide_up(s.out_height, dilate), kMostRows);
    Call call = {layer, x, bias, finish, y, accumulate, zeros, classes, tiles, false, false, false};
#if ECE408_STREAMS
    const int64_t outputs = layer.planes() * s.out_height * s.out_width;
    call.streams = !accumulate && exceeds_caches(4 * outputs) && s.out_width % kLanes == 0 &&
                   floats_past_line(y) == 0;
#endif
    const int64_t inputs = layer.planes() * s.height * s.width;
    const bool leaves_own_cache = !kGoesDown && 4 * inputs > threads * kOwnCache;
    call.fetches = dilate == 1 && (leaves_own_cache || exceeds_caches(4 * inputs));
    // Bands read an image in an order in which processors do not fetch it from memory by themselves.
    call.goes_down = kGoesDown && !call.fetches && !call.streams && s.kernel_h == 3 && dilate == 1 &&
                     s.dilate_w == 1;
    // Of few planes threads share each.
    const int64_t parts = layer.planes() < 4 * threads ? tiles : 1;
    share_runs(threads, layer.planes() * parts, [&](int64_t begin, int64_t end, int) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t part = unit % parts;
            run_plane(call, unit / parts, tiles * part / parts, tiles * (part + 1) / parts);
        }
#if ECE408_STREAMS
        finish_streams();
#endif
    });
    return ECE408_OK;
}

// ---- the gradient for x of stride 2

// Rows 2 * i and 2 * i + 1 of x with its border: of dy, rows i, i - 1, ... for the taps of even and of
// odd rows.
struct SpreadTile {
    const float* row[(5 + 1) / 2];  // of dy
    float* x[2];                    // null for a row of the border
    int64_t out_width, width, left;
    bool accumulate;
};

// Columns [at, at + 2 * kLanes) of x with its border, at the even ones first.
template <int K>
__attribute__((always_inline)) inline void spread_columns(const SpreadTile& t,
                                                          const Vec (&weight)[K * K], int64_t j) {
    constexpr int kReach = (K + 1) / 2;
    Vec dy[kReach][kReach];
    ECE408_UNROLL
    for (int q = 0; q < kReach; ++q) {
        const Mask inside = lanes_in(t.out_width, j - q);
        ECE408_UNROLL
        for (int p = 0; p < kReach; ++p) dy[p][q] = load_only(inside, t.row[p] + j - q);
    }
    const int64_t at = 2 * j - t.left;
    ECE408_UNROLL
    for (int y = 0; y < 2; ++y) {
        if (!t.x[y]) continue;
        Vec sum[2] = {broadcast(0.0f), broadcast(0.0f)};
        ECE408_UNROLL
        for (int p = y; p < K; p += 2) {
            ECE408_UNROLL
            for (int q = 0; q < K; ++q)
                sum[q % 2] = multiply_add(dy[p / 2][q / 2], weight[p * K + q], sum[q % 2]);
        }
        put_lanes(clamp_lane(-at), clamp_lane(t.width - at), t.x[y] + at,
                  interleave_first(sum[0], sum[1]), t.accumulate);
        put_lanes(clamp_lane(-at - kLanes), clamp_lane(t.width - at - kLanes),
                  t.x[y] + at + kLanes, interleave_second(sum[0], sum[1]), t.accumulate);
    }
}

// The gradient of one plane. `zeros`: a row of dy.
template <int K>
void spread_plane(const Shape& s, const float* w, const float* dy, const float* zeros, float* dx,
                  bool accumulate) {
    Vec weight[K * K];
    ECE408_UNROLL
    for (int k = 0; k < K * K; ++k) weight[k] = broadcast(w[k]);
    SpreadTile t = {{}, {}, s.out_width, s.width, s.pad_w, accumulate};
    for (int64_t i = s.pad_h / 2; 2 * i < s.pad_h + s.height; ++i) {
        for (int64_t p = 0; p < (K + 1) / 2; ++p) {
            const bool there = i - p >= 0 && i - p < s.out_height;
            t.row[p] = there ? dy + (i - p) * s.out_width : zeros;
        }
        for (int64_t y = 0; y < 2; ++y) {
            const int64_t at = 2 * i + y - s.pad_h;
            t.x[y] = at >= 0 && at < s.height ? dx + at * s.width : nullptr;
        }
        for (int64_t j = s.pad_w / 2; 2 * j < s.pad_w + s.width; j += kLanes)
            spread_columns<K>(t, weight, j);
    }
}

int spread_gradient(const Shape& s, const float* w, const float* dy, float* dx, bool accumulate,
                    int threads) {
    const auto zeros = shared_zeros<float>(1, s.out_width);
    if (!zeros) return ECE408_NO_MEMORY;
    const auto spread = s.kernel_h == 3 ? spread_plane<3> : spread_plane<5>;
    share(threads, s.batch * s.channels, [&](int64_t plane, int) {
        spread(s, w + plane % s.channels * s.kernel_h * s.kernel_w,
               dy + plane * s.out_height * s.out_width, zeros, dx + plane * s.height * s.width,
               accumulate);
    });
    return ECE408_OK;
}

int run_forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                const ece408_finish& finish, float* y, bool accumulate, int threads) {
    if (!all_finite(w, weights(problem))) return kNotFinite;
    const Layer layer = {derive(problem), problem.pad_h, problem.pad_w, w, false};
    return run_layer(layer, x, bias, finish, y, accumulate, threads);
}

int forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
            float* y, bool accumulate, int threads) {
    return run_forward(problem, x, w, bias, {}, y, accumulate, threads);
}

// Sums with another array do not follow such convolutions in networks.
int forward_packed(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                   const float*, const ece408_finish& finish, float* y, int threads) {
    if (finish.added) return ECE408_UNSUPPORTED;
    return run_forward(problem, x, w, bias, finish, y, false, threads);
}

int backward_data(const ece408_problem& problem, const float* w, const float* dy, float* dx,
                  bool accumulate, int threads) {
    if (!all_finite(w, weights(problem))) return kNotFinite;
    const Shape s = derive(problem);
    if (s.stride_h > 1) return spread_gradient(s, w, dy, dx, accumulate, threads);
    const Layer layer = {gradient_shape(s), (s.kernel_h - 1) * s.dilate_h - s.pad_h,
                         (s.kernel_w - 1) * s.dilate_w - s.pad_w, w, true};
    return run_layer(layer, dy, nullptr, {}, dx, accumulate, threads);
}

int backward_weight(const ece408_problem& problem, const float* x, const float* dy, float* dw,
                    bool accumulate, int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, dy, dw, weight_element<float>};
    if (s.kernel_h == 3)
        sum_planes<3>(s, book, x, dy, dw, accumulate, threads);
    else
        sum_planes<5>(s, book, x, dy, dw, accumulate, threads);
    return ECE408_OK;
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(depthwise) = {
    {forward, backward_data, backward_weight}, {}, {}, {},
    nullptr, nullptr, forward_packed};

}  // namespace ece408
