// The gradient for the weights of few filters: dot products of dy with shifted images (see
// flat_image.h).
//
// dy is laid out with the images' row length, zeros between its rows, so that each weight's
// gradient is one dot product per image over two flat runs, and carried from image to image in
// double. Threads take stretches of the batch, as many as weight_totals.h says, or of few images
// divide the weights among themselves.
#pragma once

#include "buffer.h"
#include "flat_image.h"
#include "lanes.h"
#include "pixels_as_lanes.h"
#include "team.h"
#include "weight_totals.h"

namespace ece408 {
namespace {

constexpr int kDotFilters = 4;
constexpr int kDotTaps = ECE408_LANES == 16 ? 4 : 2;
// Vectors after which a partial sum in the sums' own type ends.
constexpr int64_t kDotBlock = 64;

template <class Sum, int MT, int NT>
__attribute__((noinline)) void dot_tile(const Sum* dy, int64_t step, const Sum* flat,
                                        const int64_t* taps, int64_t vectors, double* out,
                                        int64_t out_step) {
    using L = Lanes<Sum>;
    for (int64_t begin = 0; begin < vectors; begin += kDotBlock) {
        const int64_t end = begin + kDotBlock < vectors ? begin + kDotBlock : vectors;
        typename L::Vec sum[MT][NT] = {};
        for (int64_t v = begin; v < end; ++v) {
            typename L::Vec in[NT];
#pragma GCC unroll 16
            for (int n = 0; n < NT; ++n) in[n] = L::load(flat + taps[n] + v * L::count);
#pragma GCC unroll 16
            for (int m = 0; m < MT; ++m) {
                const typename L::Vec factor = L::load(dy + m * step + v * L::count);
#pragma GCC unroll 16
                for (int n = 0; n < NT; ++n) sum[m][n] += factor * in[n];
            }
        }
        for (int m = 0; m < MT; ++m)
            for (int n = 0; n < NT; ++n) out[m * out_step + n] += L::sum(sum[m][n]);
    }
}

template <class Sum>
using DotTile = void (*)(const Sum*, int64_t, const Sum*, const int64_t*, int64_t, double*,
                         int64_t);

template <class Sum, int MT = kDotFilters, int NT = kDotTaps>
DotTile<Sum> pick_dot_tile(int filters, int taps) {
    if constexpr (MT > 1) {
        if (filters < MT) return pick_dot_tile<Sum, MT - 1, NT>(filters, taps);
    }
    if constexpr (NT > 1) {
        if (taps < NT) return pick_dot_tile<Sum, MT, NT - 1>(filters, taps);
    }
    return dot_tile<Sum, MT, NT>;
}

template <class T, class Sum>
void fill_gradient(const Sweep& s, const FlatImage& f, const T* dy, Sum* out) {
    for (int64_t i = 0; i < s.out_height; ++i)
        for (int64_t j = 0; j < s.out_width; ++j)
            out[i * f.row + j] = widen(dy[i * s.out_width + j]);
}

// The gradients of up to kDotFilters filters with one input channel, for one image.
template <class Sum>
void add_dots(const Sweep& s, const FlatImage& f, const Sum* image, const Sum* gradient,
              int64_t gradient_size, int64_t unit, const int64_t* taps, double* totals) {
    const int64_t blocks = (s.group_filters + kDotFilters - 1) / kDotFilters;
    const int64_t c = unit % s.group_channels, block = unit / s.group_channels % blocks;
    const int64_t group = unit / s.group_channels / blocks;
    const int64_t first = block * kDotFilters, window = s.kernel_h * s.kernel_w;
    const int64_t left = s.group_filters - first;
    const int filters = static_cast<int>(left < kDotFilters ? left : kDotFilters);
    const int64_t filter = group * s.group_filters + first;
    const int64_t vectors = (f.length + Lanes<Sum>::count - 1) / Lanes<Sum>::count;
    const Sum* flat = image + (group * s.group_channels + c) * f.channel;
    for (int64_t t = 0; t < window; t += kDotTaps) {
        const int wide = static_cast<int>(window - t < kDotTaps ? window - t : kDotTaps);
        pick_dot_tile<Sum>(filters, wide)(gradient + filter * gradient_size, gradient_size, flat,
                                          taps + t, vectors,
                                          totals + (filter * s.group_channels + c) * window + t,
                                          s.group_channels * window);
    }
}

// An image and its dy, laid out.
template <class T, class Sum>
struct DotLayout {
    const Sweep& s;
    const FlatImage& f;
    const T* x;
    const T* dy;
    const int64_t* taps;
    Sum* image;

    int64_t channels() const { return s.groups * s.group_channels; }
    int64_t filters() const { return s.groups * s.group_filters; }
    int64_t units() const {
        return s.groups * ((s.group_filters + kDotFilters - 1) / kDotFilters) * s.group_channels;
    }
    int64_t gradient_size() const { return round_up(f.length, Lanes<Sum>::count); }
    int64_t image_size() const { return channels() * f.channel + Lanes<Sum>::count; }
    int64_t floats() const { return image_size() + filters() * gradient_size(); }

    void channel(int64_t b, int64_t c) const {
        fill_channel(s, f, x + (b * channels() + c) * s.height * s.width, image + c * f.channel);
    }
    void gradient(int64_t b, int64_t m) const {
        fill_gradient(s, f, dy + (b * filters() + m) * s.out_height * s.out_width,
                      image + image_size() + m * gradient_size());
    }
    void dots(int64_t unit, double* totals) const {
        add_dots(s, f, image, image + image_size(), gradient_size(), unit, taps, totals);
    }
};

// Images [begin, end) by one thread.
template <class T, class Sum>
void add_stretch(const DotLayout<T, Sum>& layout, int64_t begin, int64_t end, double* totals) {
    for (int64_t b = begin; b < end; ++b) {
        for (int64_t c = 0; c < layout.channels(); ++c) layout.channel(b, c);
        for (int64_t m = 0; m < layout.filters(); ++m) layout.gradient(b, m);
        for (int64_t unit = 0; unit < layout.units(); ++unit) layout.dots(unit, totals);
    }
}

// All images, each by all threads.
template <class T, class Sum>
void add_together(const DotLayout<T, Sum>& layout, double* totals, int threads) {
    const int64_t channels = layout.channels();
    for (int64_t b = 0; b < layout.s.batch; ++b) {
        share(threads, channels + layout.filters(), [&](int64_t plane, int) {
            if (plane < channels)
                layout.channel(b, plane);
            else
                layout.gradient(b, plane - channels);
        });
        share(threads, layout.units(), [&](int64_t unit, int) { layout.dots(unit, totals); });
    }
}

// Returns false if there is no memory, and then has written nothing.
template <class Sum, class T>
bool run_weight_sums(const Sweep& s, const Textbook& book, const T* x, const T* dy, T* dw,
                     bool accumulate, int threads) {
    const FlatImage f = flat_image(s);
    const int64_t window = s.kernel_h * s.kernel_w;
    const int64_t weights = s.groups * s.group_filters * s.group_channels * window;
    const WeightTotals totals = weight_totals(weights, s.batch);
    const Buffer<int64_t> taps(window);
    const int64_t floats = DotLayout<T, Sum>{s, f, x, dy, taps, nullptr}.floats();
    const int64_t layouts = totals.stretches > 1 ? threads : 1;
    const auto memory = Buffer<Sum>::zeros(layouts * floats);
    if (!totals.sums || !taps || !memory) return false;
    for (int64_t t = 0; t < window; ++t)
        taps[t] = tap_offset(s, f, t / s.kernel_w, t % s.kernel_w);
    const auto layout = [&](int64_t member) -> DotLayout<T, Sum> {
        return {s, f, x, dy, taps, memory + member * floats};
    };
    add_images(totals, layout, threads);
    share(threads, weights, [&](int64_t i, int) {
        const double total = book.settled(totals.total(i), dw + i);
        narrow(static_cast<Sum>(accumulate ? widen(dw[i]) + total : total), dw + i);
    });
    return true;
}

}  // namespace
}  // namespace ece408
