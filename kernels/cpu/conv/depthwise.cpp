// Depthwise convolutions: each output plane depends on one input plane, with a small square kernel.
// Forward, the gradient for x, and with AVX2 and AVX-512 for w. Compiled once per instruction set,
// with ECE408_ISA its name and ECE408_LANES the floats of a vector; only the constant at the end is
// not local.
//
// There are so few products that touching each pixel only once matters most (depthwise_tiles.h).
// Threads take planes or, if planes are few, parts of them. If the arrays exceed the caches, a tile
// prefetches the rows of the tile below it, and outputs whose rows are whole lines are written by
// non-temporal stores. With 16 registers, 3x3 kernels go down the columns while the arrays are in
// the caches (depthwise_bands.h).
//
// An output is its bias and then its products, kernel row by kernel row, in every tile. The
// gradient for x of stride 1 is the same convolution of dy with the rotated kernel. For stride 2,
// even and odd rows and columns of x use different taps: a tile is two rows by two vectors of
// columns, which are interleaved, so that no zeros between the pixels of dy are multiplied.
#include "api/kernels.h"

#include "api/shape.h"
#include "conv/depthwise_bands.h"
#include "conv/depthwise_tiles.h"
#include "conv/depthwise_weight.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/lanes.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

// Bytes of an array per thread from which on rows are prefetched, if planes are not computed in
// bands: in networks other threads have written most of them, into their cores' caches.
constexpr int64_t kFetchedBytes = int64_t{128} << 10;

// Whether a vector may hold two output rows.
bool packs_rows(const Shape& s) {
    const bool plain = s.stride_h == 1 && s.stride_w == 1 && s.dilate_h == 1 && s.dilate_w == 1;
    return kMostPacked > 1 && plain && s.out_width == s.width && s.width * kMostPacked <= kLanes;
}

// Sets how a call's rows are packed into vectors and divided into tiles.
void plan_rows(Call* call) {
    const Shape& s = call->layer.shape;
    call->packed = packs_rows(s) ? kMostPacked : 1;
    if (call->packed > 1) {
        const int width = static_cast<int>(s.width);
        call->below_border = lanes_from(width), call->above_border = lanes_between(0, width);
    }
    const int64_t rows = divide_up(s.out_height, call->packed);
    call->classes = s.dilate_h < s.out_height ? s.dilate_h : s.out_height;
    call->rows = rows / call->classes, call->one_more = rows % call->classes;
    // All tiles have the same number of rows; rows of two tiles are computed by both.
    call->tile_rows = divide_up(call->rows, divide_up(call->rows, kMostRows));
    call->tiles = divide_up(call->rows + (call->one_more > 0), call->tile_rows);
}

int run_layer(const Layer& layer, const float* x, const float* bias, const ece408_epilogue& epilogue,
              float* y, bool accumulate, int threads) {
    const Shape& s = layer.shape;
    const int64_t vectors = divide_up(s.out_width, kLanes);
    const int64_t before = layer.left > 0 ? layer.left : 0;
    const int64_t after = layer.left < 0 ? -layer.left : 0;
    const int64_t reach = (vectors + 1) * kLanes * s.stride_w + s.kernel_w * s.dilate_w + after;
    const auto zeros = parallel_zeros<float>(1, before + reach);
    const Buffer<Column> columns(vectors);
    if (!zeros || !columns) return ECE408_NO_MEMORY;
    Call call = {};
    call.layer = layer, call.epilogue = epilogue, call.accumulate = accumulate;
    call.x = x, call.x_end = x + s.batch * s.channels * s.height * s.width;
    call.bias = bias, call.y = y;
    call.zeros = zeros + before, call.columns = columns, call.reach = reach;
    plan_rows(&call);
    for (int64_t v = 0; v < vectors; ++v) columns[v] = column_from(call, v * kLanes);
#if ECE408_STREAMS
    const int64_t outputs = layer.planes() * s.out_height * s.out_width;
    call.streams = !accumulate && exceeds_caches(4 * outputs) && s.out_width % kLanes == 0 &&
                   floats_past_line(y) == 0;
#endif
    const int64_t inputs = layer.planes() * s.height * s.width;
    const bool is_large = !kGoesDown && 4 * inputs > threads * kFetchedBytes;
    const bool fetches = s.dilate_h == 1 && (is_large || exceeds_caches(4 * inputs));
    const int64_t lines = divide_up(call.tile_rows * s.stride_h * s.width, kLine);
    call.ahead_lines = fetches ? divide_up(lines, vectors) : 0;
    // Bands read an image in an order that hardware prefetchers do not follow.
    call.goes_down = kGoesDown && !fetches && !call.streams && s.kernel_h == 3 && s.dilate_h == 1 &&
                     s.dilate_w == 1;
    RunPlanes* const by_tiles = s.kernel_h == 3 ? pick_planes<3>(call) : pick_planes<5>(call);
    RunPlanes* const run = call.goes_down ? run_bands : by_tiles;
    // If planes are few, threads divide each.
    const int64_t parts = layer.planes() < 4 * threads ? call.tiles : 1;
    parallel_for_ranges(threads, layer.planes() * parts, [&](int64_t begin, int64_t end, int) {
        if (parts == 1) {
            run(call, begin, end, 0, call.tiles);
        } else {
            for (int64_t unit = begin; unit < end; ++unit) {
                const int64_t plane = unit / parts, part = unit % parts;
                run(call, plane, plane + 1, call.tiles * part / parts,
                    call.tiles * (part + 1) / parts);
            }
        }
#if ECE408_STREAMS
        stream_fence();
#endif
    });
    return ECE408_OK;
}

// ---- the gradient for x of stride 2

// Rows 2 * i and 2 * i + 1 of x with its border; they use rows i, i - 1, ... of dy for the taps of
// even and odd rows.
struct SpreadTile {
    const float* row[(5 + 1) / 2];  // of dy
    float* x[2];                    // null for a row of the border
    int64_t out_width, width, left;
    bool accumulate;
};

// Computes columns [at, at + 2 * kLanes) of x with its border.
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
    const auto zeros = parallel_zeros<float>(1, s.out_width);
    if (!zeros) return ECE408_NO_MEMORY;
    const auto spread = s.kernel_h == 3 ? spread_plane<3> : spread_plane<5>;
    parallel_for(threads, s.batch * s.channels, [&](int64_t plane, int) {
        spread(s, w + plane % s.channels * s.kernel_h * s.kernel_w,
               dy + plane * s.out_height * s.out_width, zeros, dx + plane * s.height * s.width,
               accumulate);
    });
    return ECE408_OK;
}

int run_forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                const ece408_epilogue& epilogue, float* y, bool accumulate, int threads) {
    if (!all_finite(w, weights(problem))) return kNotFinite;
    const Layer layer = {derive(problem), problem.pad_h, problem.pad_w, w, false};
    return run_layer(layer, x, bias, epilogue, y, accumulate, threads);
}

int forward(const ece408_problem& problem, const float* x, const float* w, const float* bias,
            float* y, bool accumulate, int threads) {
    return run_forward(problem, x, w, bias, {}, y, accumulate, threads);
}

// In networks no sum with another array follows such convolutions.
int forward_packed(const ece408_problem& problem, const float* x, const float* w, const float* bias,
                   const float*, const ece408_epilogue& epilogue, float* y, int threads) {
    if (epilogue.added) return ECE408_UNSUPPORTED;
    return run_forward(problem, x, w, bias, epilogue, y, false, threads);
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
    const bool three = s.kernel_h == 3;
    if (is_shifted_plane(s)) {
        (three ? sum_planes<3> : sum_planes<5>)(s, book, x, dy, dw, accumulate, threads);
        return ECE408_OK;
    }
    const auto sum = s.stride_h == 1 ? three ? sum_rows<3, 1> : sum_rows<5, 1>
                                     : three ? sum_rows<3, 2> : sum_rows<5, 2>;
    return sum(s, book, x, dy, dw, accumulate, threads);
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(depthwise) = {
    {forward, backward_data, backward_weight}, {}, {},
    nullptr, nullptr, forward_packed};

}  // namespace ece408
