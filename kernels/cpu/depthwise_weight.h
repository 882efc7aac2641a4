// The gradient for the weights of depthwise convolutions of small planes, nothing copied: with rows of
// the output as long as those of the input, what a tap reads for all outputs is the plane, shifted.
//
// A vector of dy meets one of x for each tap. Lanes whose pixel would lie in the border are left out of
// the load; which these are is the same for all planes. The sums of a filter stay in registers from
// image to image. Threads take filters.
#pragma once

#include "dot_tile.h"
#include "shape.h"
#include "team.h"
#include "textbook.h"
#include "vector.h"

namespace ece408 {
namespace {

constexpr int64_t kMostPlaneVectors = kSmallPlane / kLanes;
// Products of a lane after which a sum in float ends.
constexpr int64_t kPlaneProducts = 64;

template <int K>
struct PlaneTaps {
    int64_t vectors, offset[K * K];  // of dy; of a tap in x
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

// Adds the products of some images' planes, `x_step` and `dy_step` apart, to totals.
template <int K>
void add_planes(const PlaneTaps<K>& taps, const float* x, int64_t x_step, const float* dy,
                int64_t dy_step, int64_t images, double* totals) {
    Vec sum[K * K] = {};
    for (int64_t b = 0; b < images; ++b, x += x_step, dy += dy_step) {
        for (int64_t v = 0; v < taps.vectors; ++v) {
            // Of the plane behind this one, which is likely to be the next.
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
    typename Lanes<float>::Vec lanes[K * K];
    for (int tap = 0; tap < K * K; ++tap)
        lanes[tap] = (typename Lanes<float>::Vec)sum[tap];
    add_to_totals<float, 1, K * K>(lanes, totals, K * K);
}

template <int K>
void sum_planes(const Shape& s, const Textbook& book, const float* x, const float* dy, float* dw,
                bool accumulate, int threads) {
    const PlaneTaps<K> taps(s);
    const int64_t in = s.height * s.width, out = s.out_height * s.out_width;
    const int64_t at_once = divide_up(kPlaneProducts, taps.vectors);
    share(threads, s.filters, [&](int64_t m, int) {
        double totals[K * K] = {};
        for (int64_t b = 0; b < s.batch; b += at_once) {
            const int64_t left = s.batch - b;
            add_planes<K>(taps, x + (b * s.channels + m / s.group_filters) * in, s.channels * in,
                          dy + (b * s.filters + m) * out, s.filters * out,
                          left < at_once ? left : at_once, totals);
        }
        float* to = dw + m * K * K;
        for (int tap = 0; tap < K * K; ++tap) {
            const double total = book.settled(totals[tap], to + tap);
            to[tap] = static_cast<float>(accumulate ? to[tap] + total : total);
        }
    });
}

}  // namespace
}  // namespace ece408
