// The gradient for w of depthwise convolutions, without copies. A vector of dy is multiplied with
// one of x per tap. Lanes whose pixel is in the border are masked out of the load, by the same
// masks for all planes. Threads take filters.
//
// For small planes whose output rows are as long as the input's, a tap reads the plane, shifted:
// the sums of a filter stay in registers from image to image. Other planes are divided into bands
// of rows, and these into strips of one vector of columns, in which a row of x is loaded once for
// all rows of dy that use it. Planes are read in memory order, and each prefetches the next: from
// memory, 112x112 takes three times as long without.
#pragma once

#include "api/shape.h"
#include "conv/depthwise_tiles.h"
#include "conv/textbook.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/dot_tile.h"
#include "micro/vector.h"

namespace ece408 {
namespace {

constexpr int64_t kMostPlaneVectors = kSmallPlane / kLanes;
// Products per lane after which a float sum is added to totals.
constexpr int64_t kPlaneProducts = 64;

template <int K>
struct PlaneTaps {
    int64_t vectors, offset[K * K];  // of dy; offset of a tap in x
    Mask outputs[kMostPlaneVectors], inside[kMostPlaneVectors][K * K];

    explicit PlaneTaps(const Shape& s)
        : vectors(divide_up(s.out_height * s.out_width, int64_t{kLanes})) {
        for (int64_t tap = 0; tap < K * K; ++tap) {
            const int64_t down = tap / K * s.dilate_h - s.pad_h;
            const int64_t across = tap % K * s.dilate_w - s.pad_w;
            offset[tap] = down * s.width + across;
            for (int64_t v = 0; v < vectors; ++v)
                inside[v][tap] = lanes_where([&](int64_t lane) {
                    const int64_t pixel = v * kLanes + lane;
                    return pixel < s.out_height * s.out_width &&
                           is_inside(pixel / s.out_width + down, s.height) &&
                           is_inside(pixel % s.out_width + across, s.width);
                });
        }
        for (int64_t v = 0; v < vectors; ++v) {
            const int64_t left = s.out_height * s.out_width - v * kLanes;
            outputs[v] = lanes_between(0, static_cast<int>(left < kLanes ? left : kLanes));
        }
    }

private:
    static bool is_inside(int64_t i, int64_t size) { return i >= 0 && i < size; }
};

// Adds the lanes of sums to totals and clears the sums. Not inlined, or GCC spills the sums.
template <int K>
__attribute__((noinline)) void add_sums(Vec (&sum)[K * K], double* totals) {
    typename Lanes<float>::Vec lanes[K * K];
    for (int tap = 0; tap < K * K; ++tap) {
        lanes[tap] = (typename Lanes<float>::Vec)sum[tap];
        sum[tap] = Vec{};
    }
    add_to_totals<float, 1, K * K>(lanes, totals, K * K);
}

// Stores the totals of a filter as gradients.
template <int K>
void put_totals(const Textbook& book, const double* totals, float* to, bool accumulate) {
    for (int tap = 0; tap < K * K; ++tap) {
        const double total = book.finite_or_textbook(totals[tap], to + tap);
        to[tap] = static_cast<float>(accumulate ? to[tap] + total : total);
    }
}

// Adds the products of some images' planes, `x_step` and `dy_step` apart, to totals.
template <int K>
void add_planes(const PlaneTaps<K>& taps, const float* x, int64_t x_step, const float* dy,
                int64_t dy_step, int64_t images, double* totals) {
    Vec sum[K * K] = {};
    for (int64_t b = 0; b < images; ++b, x += x_step, dy += dy_step) {
        for (int64_t v = 0; v < taps.vectors; ++v) {
            // The plane behind this one is probably the next.
            prefetch(x + (taps.vectors + v) * kLanes);
            prefetch(dy + (taps.vectors + v) * kLanes);
            const Vec from = load_only(taps.outputs[v], dy + v * kLanes);
            ECE408_UNROLL
            for (int tap = 0; tap < K * K; ++tap) {
                const float* at = x + v * kLanes + taps.offset[tap];
                sum[tap] = multiply_add(from, load_only(taps.inside[v][tap], at), sum[tap]);
            }
        }
    }
    Vec all[K * K];
    ECE408_UNROLL
    for (int tap = 0; tap < K * K; ++tap) all[tap] = sum[tap];
    add_sums<K>(all, totals);
}

template <int K>
void sum_planes(const Shape& s, const Textbook& book, const float* x, const float* dy, float* dw,
                bool accumulate, int threads) {
    const PlaneTaps<K> taps(s);
    const int64_t in = s.height * s.width, out = s.out_height * s.out_width;
    const int64_t at_once = divide_up(kPlaneProducts, taps.vectors);
    parallel_for(threads, s.filters, [&](int64_t m, int) {
        double totals[K * K] = {};
        for (int64_t b = 0; b < s.batch; b += at_once) {
            const int64_t left = s.batch - b;
            add_planes<K>(taps, x + (b * s.channels + m / s.group_filters) * in, s.channels * in,
                          dy + (b * s.filters + m) * out, s.filters * out,
                          left < at_once ? left : at_once, totals);
        }
        put_totals<K>(book, totals, dw + m * K * K, accumulate);
    });
}

// A vector of output columns.
template <int K, int S>
struct Strip {
    Mask outputs, inside[kLoads<K, S>];  // valid lanes of dy, and of the loads of a row of x
    int64_t column, at;                  // first column in dy, and in x, where it may be negative
    bool is_inside;

    Strip(const Shape& s, int64_t column)
        : outputs(lanes_between(0, clamp_lane(s.out_width - column))), column(column),
          at(column * S - s.pad_w) {
        for (int n = 0; n < kLoads<K, S>; ++n)
            inside[n] = lanes_in(s.width, at + load_column(n, S, 1));
        const int64_t end = at + load_column(kLoads<K, S> - 1, S, 1) + kLanes;
        is_inside = at >= 0 && end <= s.width;
    }
};

// Prefetches `lines` lines with each row.
struct PlanePrefetch {
    const float* at;
    int64_t lines;

    void issue() {
        for (int64_t line = 0; line < lines; ++line, at += kLine) prefetch(at);
    }
};

// A channel's plane of x and one of dy, and the next ones to prefetch.
struct Planes {
    const float *x, *dy;
    PlanePrefetch x_prefetch, dy_prefetch;
};

// Adds the products of rows [begin, end) of dy in a strip, and of earlier rows whose windows end
// here. Row i of dy is read with rows S * i to S * i + S - 1 of x, less the border.
template <int K, int S, bool Inside>
__attribute__((noinline)) void add_strip(const Shape& s, const Strip<K, S>& strip, Planes* planes,
                                         int64_t begin, int64_t end, Vec* sums) {
    constexpr int kRows = (K + S - 1) / S;  // rows of dy that use a row of x
    const float *const x = planes->x, *const dy = planes->dy;
    PlanePrefetch x_prefetch = planes->x_prefetch, dy_prefetch = planes->dy_prefetch;
    Mask inside[kLoads<K, S>];
    ECE408_UNROLL
    for (int n = 0; n < kLoads<K, S>; ++n) inside[n] = strip.inside[n];
    const auto row_of_dy = [&](int64_t i) {
        const bool there = i >= 0 && i < s.out_height;
        return there ? load_only(strip.outputs, dy + i * s.out_width + strip.column) : Vec{};
    };
    Vec sum[K * K], from[kRows];
    ECE408_UNROLL
    for (int tap = 0; tap < K * K; ++tap) sum[tap] = sums[tap];
    ECE408_UNROLL
    for (int k = 0; k + 1 < kRows; ++k) from[k] = row_of_dy(begin - 1 - k);
    for (int64_t i = begin; i < end; ++i) {
        ECE408_UNROLL
        for (int k = kRows - 1; k > 0; --k) from[k] = from[k - 1];
        from[0] = row_of_dy(i);
        x_prefetch.issue(), dy_prefetch.issue();
        ECE408_UNROLL
        for (int y = 0; y < S; ++y) {
            const int64_t h = i * S + y - s.pad_h;
            if (h < 0 || h >= s.height) continue;
            Vec tap[K];
            load_taps<K, S, Inside>(x + h * s.width + strip.at, 1, inside, tap);
            ECE408_UNROLL
            for (int p = y; p < K; p += S) {
                ECE408_UNROLL
                for (int q = 0; q < K; ++q)
                    sum[p * K + q] = multiply_add(tap[q], from[(p - y) / S], sum[p * K + q]);
            }
        }
    }
    planes->x_prefetch = x_prefetch, planes->dy_prefetch = dy_prefetch;
    ECE408_UNROLL
    for (int tap = 0; tap < K * K; ++tap) sums[tap] = sum[tap];
}

// The fewest rows of a band, also if planes are so wide that it has more products than
// kPlaneProducts.
constexpr int64_t kLeastBand = 8;

template <int K, int S>
struct RowSums {
    const Shape& s;
    const float *x, *dy;
    const Strip<K, S>* strips;
    int64_t vectors, rows, band, x_lines, dy_lines;

    RowSums(const Shape& s, const float* x, const float* dy, Strip<K, S>* strips)
        : s(s), x(x), dy(dy), strips(strips), vectors(divide_up(s.out_width, int64_t{kLanes})),
          rows(s.out_height + (K - 1) / S) {
        for (int64_t v = 0; v < vectors; ++v) strips[v] = Strip<K, S>(s, v * kLanes);
        const int64_t even = kPlaneProducts / vectors;
        band = even < kLeastBand ? kLeastBand : even;
        x_lines = divide_up(s.height * s.width, kLine * vectors * rows);
        dy_lines = divide_up(s.out_height * s.out_width, kLine * vectors * rows);
    }

    const float* x_of(int64_t image, int64_t filter) const {
        return x + (image * s.channels + filter / s.group_filters) * s.height * s.width;
    }
    const float* dy_of(int64_t image, int64_t filter) const {
        return dy + (image * s.filters + filter) * s.out_height * s.out_width;
    }

    // Adds filters [begin, end), image by image.
    void add(int64_t begin, int64_t end, double* totals) const {
        for (int64_t b = 0; b < s.batch; ++b)
            for (int64_t m = begin; m < end; ++m) {
                const bool is_last = m + 1 == end;
                const int64_t next = is_last ? begin : m + 1, image = is_last ? b + 1 : b;
                add_plane({x_of(b, m), dy_of(b, m), {x_of(image, next), x_lines},
                           {dy_of(image, next), dy_lines}},
                          totals + m * K * K);
            }
    }

    void add_plane(Planes planes, double* totals) const {
        Vec sums[K * K] = {};
        int64_t products = 0;
        for (int64_t begin = 0; begin < rows; begin += band) {
            const int64_t end = begin + band < rows ? begin + band : rows;
            for (int64_t v = 0; v < vectors; ++v) {
                (strips[v].is_inside ? add_strip<K, S, true> : add_strip<K, S, false>)(
                    s, strips[v], &planes, begin, end, sums);
                products += end - begin;
                if (products + band <= kPlaneProducts) continue;
                add_sums<K>(sums, totals);
                products = 0;
            }
        }
        if (products > 0) add_sums<K>(sums, totals);
    }
};

template <int K, int S>
int sum_rows(const Shape& s, const Textbook& book, const float* x, const float* dy, float* dw,
             bool accumulate, int threads) {
    const Buffer<Strip<K, S>> strips(divide_up(s.out_width, int64_t{kLanes}));
    const auto totals = parallel_zeros<double>(1, s.filters * K * K);
    if (!strips || !totals) return ECE408_NO_MEMORY;
    const RowSums<K, S> sums(s, x, dy, strips);
    parallel_for_ranges(threads, s.filters, [&](int64_t begin, int64_t end, int) {
        sums.add(begin, end, totals);
        for (int64_t m = begin; m < end; ++m)
            put_totals<K>(book, totals + m * K * K, dw + m * K * K, accumulate);
    });
    return ECE408_OK;
}

}  // namespace
}  // namespace ece408
