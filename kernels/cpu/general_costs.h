// What the ways that general.cpp has to compute a convolution take, estimated: sliding over images
// (pixels_as_lanes.h, filters_as_lanes.h, weight_sums.h, filters_as_lanes_weight.h) or a product of
// patches (patches.h).
//
// Costs are of one group, in multiply-adds of vectors, two of which take a cycle. Constants are
// fitted to the times of about 60 shapes with AVX-512.
#pragma once

#include "filters_as_lanes_weight.h"
#include "patches.h"

namespace ece408 {
namespace {

template <class Sum>
struct Costs {
    Sweep s;    // of the forward pass
    bool deep;  // whether y, or the gradient that is asked for, has enough channels to be lanes
    double batch, channels, filters, taps, pixels, all_pixels, source, weights;

    Costs(const Sweep& s, bool deep) : s(s), deep(deep) {
        batch = static_cast<double>(s.batch);
        channels = static_cast<double>(s.in_channels);
        filters = static_cast<double>(s.out_channels);
        taps = channels * static_cast<double>(s.kernel_h * s.kernel_w);
        pixels = static_cast<double>(s.out_height * s.out_width);
        all_pixels = batch * pixels;
        source = channels * static_cast<double>(s.height * s.width);
        weights = filters * taps;
    }
    static double vectors(double numbers) {
        return static_cast<double>(divide_up(static_cast<int64_t>(numbers), Lanes<Sum>::count));
    }
    // To copy a batch's images in the order that the kernels which slide over them have.
    double laid_out() const {
        return batch * source * (s.stride_w > 2 ? 4 : s.stride_w > 1 ? 2 : 1);
    }
    // To copy a pixel's patch, in runs of taps.
    double copied(int64_t longest) const {
        return 35 * taps / static_cast<double>(at_most(s.kernel_w, longest)) + 1.5 * taps;
    }

    double forward_sliding() const {
        if (!deep)
            return batch * filters * taps * vectors(flat_image(s).length) + laid_out() +
                   6 * weights;
        // Tiles of a few pixels wait for their sums.
        const double columns = static_cast<double>(s.out_width > 4 ? s.out_width : 4);
        const double rows = static_cast<double>(s.out_height);
        return batch * (rows * columns * taps * vectors(filters) + source) + 5 * weights;
    }
    double forward_patches() const {
        const double dots = filters * (2.5 * vectors(taps) + 16);
        return all_pixels * (dots + copied(s.kernel_w)) + weights;
    }

    double data_sliding() const {
        const double places = static_cast<double>(s.height * s.width);
        if (deep) {
            const double steps = static_cast<double>(s.stride_h * s.stride_w);
            const double window = taps / channels;
            return 0.8 * batch * filters * window * places / steps * vectors(channels) +
                   4 * steps * window;
        }
        const double row = static_cast<double>(s.width + (s.kernel_w - 1) * s.dilate_w);
        const double rows = static_cast<double>(s.height + (s.kernel_h - 1) * s.dilate_h);
        const double laid_out = rows * row * (s.stride_h > 1 || s.stride_w > 1 ? 6 : 1);
        const double products = taps * vectors(static_cast<double>(s.height) * row);
        return batch * filters * (products + laid_out);
    }
    double data_patches() const {
        const double added = s.dilate_w == 1 && s.kernel_w >= 64 ? 1 : 4;
        return all_pixels * (filters * vectors(taps) + added * taps) + 3 * batch * source + weights;
    }

    double weight_sliding() const {
        if (s.out_channels < kDeepLeastFilters)
            return batch * weights * (vectors(flat_image(s).length) + 26) + laid_out();
        return all_pixels * taps * vectors(filters) + 4 * batch * source + 30 * weights;
    }
    double weight_patches() const {
        return all_pixels * (filters * vectors(taps) + copied(kPanel<Sum>)) + 4 * weights;
    }
};

}  // namespace
}  // namespace ece408
