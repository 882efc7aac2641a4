// Pooling, normalisation over channels and resizing of planes.
#include <float.h>
#include <math.h>

#include "host/buffer.h"
#include "host/thread_pool.h"
#include "network/steps.h"

namespace ece408 {
namespace {

using Windows = ece408_windows;

int64_t begin_of(const Windows& w, int64_t i) { return most(i * w.stride - w.pad, 0); }
int64_t end_of(const Windows& w, int64_t i) {
    return least(i * w.stride - w.pad + w.kernel, w.size);
}

// The length of window i for an average; 0 if it is empty.
int64_t length_of(const Windows& w, int64_t i, bool border) {
    const int64_t first = i * w.stride - w.pad;
    if (!border) return most(end_of(w, i) - begin_of(w, i), 0);
    return most(least(first + w.kernel, w.size + w.pad) - first, 0);
}

// Whether every window has an element of the plane.
bool all_meet(const Windows& w) {
    return w.kernel > w.pad && (w.count - 1) * w.stride - w.pad < w.size;
}

// A plane with windows that may have no element.
void pool_plane(const ece408_pooled& of, const float* x, float* y) {
    for (int64_t i = 0; i < of.rows.count; ++i) {
        for (int64_t j = 0; j < of.columns.count; ++j) {
            float found = of.kind == ECE408_LARGEST ? -FLT_MAX : 0;
            for (int64_t r = begin_of(of.rows, i); r < end_of(of.rows, i); ++r) {
                for (int64_t c = begin_of(of.columns, j); c < end_of(of.columns, j); ++c) {
                    const float value = x[r * of.columns.size + c];
                    if (of.kind == ECE408_LARGEST)
                        found = value > found ? value : found;
                    else
                        found += value;
                }
            }
            if (of.kind == ECE408_AVERAGE) {
                const int64_t size =
                    length_of(of.rows, i, of.border) * length_of(of.columns, j, of.border);
                found = size ? found / static_cast<float>(size) : 0;
            }
            *y++ = found;
        }
    }
}

// The windows' heights, then their widths, for averages; ones for sums.
Buffer<float> lengths_of(const ece408_pooled& of) {
    Buffer<float> lengths(of.rows.count + of.columns.count);
    if (!lengths) return lengths;
    for (int64_t k = 0; k < of.rows.count + of.columns.count; ++k) {
        const int64_t j = k - of.rows.count;
        const int64_t length =
            j < 0 ? length_of(of.rows, k, of.border) : length_of(of.columns, j, of.border);
        lengths[k] = of.kind == ECE408_AVERAGE ? static_cast<float>(length) : 1;
    }
    return lengths;
}

// MXNet's BilinearResize2D: the input coordinate of output pixel `i`.
struct Source {
    int64_t first, next;  // the next pixel's distance: 1, or 0 at the end
    float part;

    Source(int64_t i, int64_t in, int64_t out, bool aligned) {
        const auto from = static_cast<float>(i);
        float at = 0;
        if (aligned && out > 1)
            at = static_cast<float>(in - 1) / static_cast<float>(out - 1) * from;
        if (!aligned) {
            const float scale = out > 1 ? static_cast<float>(in) / static_cast<float>(out) : 0;
            at = fmaxf(scale * (from + .5f) - .5f, 0);
        }
        first = static_cast<int64_t>(at);
        part = at - static_cast<float>(first);
        next = first < in - 1;
    }
};

// Normalises `count` adjacent pixels of all channels of an image.
void normalise_pixels(const ece408_lrn& of, const float* x, int64_t count, float* sums, float* y) {
    const auto alpha = static_cast<float>(of.alpha) / static_cast<float>(of.size);
    const auto beta = static_cast<float>(of.beta), knorm = static_cast<float>(of.knorm);
    for (int64_t channel = 0; channel < of.channels; ++channel) {
        for (int64_t k = 0; k < count; ++k) sums[k] = 0;
        const int64_t end = least(channel + of.size / 2 + 1, of.channels);
        for (int64_t other = most(channel - of.size / 2, 0); other < end; ++other) {
            const float* const from = x + other * of.plane;
            for (int64_t k = 0; k < count; ++k) sums[k] += from[k] * from[k];
        }
        const float* const from = x + channel * of.plane;
        float* const to = y + channel * of.plane;
        for (int64_t k = 0; k < count; ++k) sums[k] = knorm + alpha * sums[k];
        // The usual power, by square roots.
        if (beta == .75f)
            for (int64_t k = 0; k < count; ++k)
                to[k] = from[k] / (sqrtf(sums[k]) * sqrtf(sqrtf(sums[k])));
        else
            for (int64_t k = 0; k < count; ++k) to[k] = from[k] * powf(sums[k], -beta);
    }
}

}  // namespace

int pool_planes(const Step& step) {
    const ece408_pooled& of = step.of.of.pooled;
    const float* const x = input(step, 0);
    float* const y = output(step);
    const int64_t in_plane = of.rows.size * of.columns.size;
    const int64_t out_plane = of.rows.count * of.columns.count;
    const int64_t in_image = step.of.in[0].image ? step.of.in[0].image : of.channels * in_plane;
    const int64_t out_image = step.of.out.image ? step.of.out.image : of.channels * out_plane;
    if (!all_meet(of.rows) || !all_meet(of.columns)) {
        const int threads = useful_threads(step, of.images * of.channels * in_plane, 1);
        parallel_for(threads, of.images * of.channels, [&](int64_t plane, int) {
            const int64_t image = plane / of.channels, channel = plane % of.channels;
            pool_plane(of, x + image * in_image + channel * in_plane,
                       y + image * out_image + channel * out_plane);
        });
        return ECE408_OK;
    }
    const Buffer<float> lengths = lengths_of(of);
    if (!lengths) return ECE408_NO_MEMORY;
    const float* const heights =
        of.kind == ECE408_LARGEST ? nullptr : static_cast<float*>(lengths);
    const float* const widths = heights ? heights + of.rows.count : nullptr;
    const bool together =
        in_image == of.channels * in_plane && out_image == of.channels * out_plane;
    const int64_t calls = together ? 1 : of.images;
    const int64_t planes = together ? of.images * of.channels : of.channels;
    const int threads = useful_threads(step, planes * in_plane, 1);
    for (int64_t k = 0; k < calls; ++k) {
        const int status =
            ece408_pool(&of.rows, &of.columns, heights, widths, planes, x + k * in_image,
                        y + k * out_image, threads, step.isa);
        if (status != ECE408_OK) return status;
    }
    return ECE408_OK;
}

int pool_gradient(const Step& step) {
    const ece408_pooled& of = step.of.of.pooled;
    const float *const dy = input(step, 0), *const x = input(step, 1), *const y = input(step, 2);
    const bool is_largest = of.kind == ECE408_LARGEST;
    if (is_largest && !(x && y)) return ECE408_INVALID;
    const Buffer<float> lengths = lengths_of(of);
    if (!lengths) return ECE408_NO_MEMORY;
    const float* const heights = is_largest ? nullptr : static_cast<float*>(lengths);
    const int64_t planes = of.images * of.channels;
    const int threads = useful_threads(step, planes * of.rows.size * of.columns.size, 2);
    return ece408_pool_backward(&of.rows, &of.columns, heights,
                                heights ? heights + of.rows.count : nullptr, planes, x, y, dy,
                                output(step), threads, step.isa);
}

int normalise_channels(const Step& step) {
    constexpr int64_t kPixels = 1024, kCost = 8;
    const ece408_lrn& of = step.of.of.lrn;
    const float* const x = input(step, 0);
    float* const y = output(step);
    const int threads = useful_threads(step, of.elements, kCost);
    const Buffer<float> sums(threads * kPixels);
    if (!sums) return ECE408_NO_MEMORY;
    const int64_t image = most(of.channels * of.plane, 1), parts = parts_of(of.plane, kPixels);
    parallel_for(threads, of.elements / image * parts, [&](int64_t chunk, int thread) {
        const int64_t first = chunk % parts * kPixels, at = chunk / parts * image + first;
        normalise_pixels(of, x + at, least(of.plane - first, kPixels), sums + thread * kPixels,
                         y + at);
    });
    return ECE408_OK;
}

int resize_planes(const Step& step) {
    constexpr int64_t kCost = 4;
    const ece408_resized& of = step.of.of.resized;
    const float* const x = input(step, 0);
    float* const y = output(step);
    const Buffer<Source> columns(of.out_width);
    if (!columns) return ECE408_NO_MEMORY;
    for (int64_t j = 0; j < of.out_width; ++j)
        columns[j] = Source(j, of.width, of.out_width, of.aligned);
    const int64_t rows = of.planes * of.out_height;
    const int threads = useful_threads(step, rows * of.out_width, kCost);
    parallel_for(threads, rows, [&](int64_t number, int) {
        const Source row(number % of.out_height, of.height, of.out_height, of.aligned);
        const float* const top = x + (number / of.out_height * of.height + row.first) * of.width;
        const float* const bottom = top + row.next * of.width;
        float* const to = y + number * of.out_width;
        for (int64_t j = 0; j < of.out_width; ++j) {
            const Source& c = columns[j];
            const auto across = [&](const float* from) {
                return (1 - c.part) * from[c.first] + c.part * from[c.first + c.next];
            };
            to[j] = (1 - row.part) * across(top) + row.part * across(bottom);
        }
    });
    return ECE408_OK;
}

}  // namespace ece408
