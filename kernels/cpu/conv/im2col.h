// Convolutions by im2col, for windows that have little in common or are few. Each output pixel has
// a patch: the pixels of its window side by side, as a filter has its weights.
//
//     y  = patches * w, transposed
//     dw = dy, transposed, * patches
//     dx = the patches dy * w, each added to the place of its window (col2im)
//
// This multiplies only what must be multiplied, however far windows are apart and however much of
// an image each covers. Kernels that slide over images multiply zeros between the pixels of dy, and
// beyond an image that is no larger than its window. In exchange, every patch is a copy.
//
// Vectorised over adjacent taps. The products use the register tile of conv_fwd_oc.h, with pixels
// or filters in place of its pixels and taps in place of its filters; y uses the dot products of
// dot_tile.h. The tasks are independent, and do not depend on the number of threads.
#pragma once

#include "conv/oc_tile.h"
#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/dot_tile.h"

namespace ece408 {
namespace {

// The least number of tasks, if the problem allows it.
constexpr int64_t kLeastTasks = 16;
// Rows of dy per task, for each row in the windows of two tasks.
constexpr int64_t kLeastOwnRows = 4;
// The most sums of dx that a thread holds.
constexpr int64_t kMostKept = 1 << 19;

template <class T>
int64_t bytes_of(int64_t count) {
    return count * static_cast<int64_t>(sizeof(T));
}

inline int64_t at_most(int64_t value, int64_t most) { return value < most ? value : most; }

// The taps and output pixels of one group.
struct Im2col {
    Sweep s;

    int64_t window() const { return s.kernel_h * s.kernel_w; }
    int64_t taps() const { return s.group_channels * window(); }
    int64_t pixels() const { return s.out_height * s.out_width; }
    int64_t all_pixels() const { return s.batch * pixels(); }
};

// Taps of one row of the kernel: lanes [lane, lane + count) of a panel.
struct TapRun {
    int64_t channel, p, q, lane, count;
};

// Lanes of a panel. It has at most as many runs.
template <class Sum>
constexpr int64_t kPanel = kOcVectors * Lanes<Sum>::count;

// A panel: taps [first, first + count) of a group, as runs.
template <class Sum>
struct Panel {
    TapRun run[kPanel<Sum>];
    int64_t runs, first, count;

    Panel(const Im2col& of, int64_t first, int64_t count) : runs(0), first(first), count(count) {
        const int64_t wide = of.s.kernel_w;
        for (int64_t lane = 0; lane < count; lane += run[runs++].count) {
            const int64_t tap = first + lane, q = tap % wide;
            run[runs] = {tap / of.window(), tap / wide % of.s.kernel_h, q, lane,
                         at_most(wide - q, count - lane)};
        }
    }
    int64_t vectors() const { return divide_up(count, Lanes<Sum>::count); }
    int64_t lanes() const { return vectors() * Lanes<Sum>::count; }
};

// Copies the pixels of a group's image under a run of taps, for output pixel (i, j), with zeros for
// the border.
template <class T, class Sum>
void copy_run(const Sweep& s, const T* image, const TapRun& run, int64_t i, int64_t j, Sum* out) {
    const int64_t y = i * s.stride_h + run.p * s.dilate_h - s.pad_h;
    const int64_t x = j * s.stride_w + run.q * s.dilate_w - s.pad_w, step = s.dilate_w;
    int64_t begin = 0, end = 0;
    if (y >= 0 && y < s.height) {
        begin = x < 0 ? at_most(divide_up(-x, step), run.count) : 0;
        end = x < s.width ? at_most(divide_up(s.width - x, step), run.count) : 0;
        if (end < begin) end = begin;
    }
    for (int64_t k = 0; k < begin; ++k) out[k] = 0;
    const T* line = image + (run.channel * s.height + y) * s.width + x;
    if (step == 1)
        for (int64_t k = begin; k < end; ++k) out[k] = line[k];
    else
        for (int64_t k = begin; k < end; ++k) out[k] = line[k * step];
    for (int64_t k = end; k < run.count; ++k) out[k] = 0;
}

// Sums `count` products of a tile of `tall` rows, whose factors are `step` apart, with a panel.
template <class Sum>
void sum_panel(const Sum* factors, int64_t tall, int64_t step, int64_t count, const Sum* panel,
               int64_t vectors, Sum* sums) {
    const auto tile = pick_oc_tile<Sum>(vectors, tall, 0, true);
    for (int64_t done = 0; done < count; done += kSumBlock)
        tile(factors + done * step, step, nullptr, at_most(count - done, kSumBlock),
             panel + done * vectors * Lanes<Sum>::count, {panel, 0}, done > 0, sums);
}

// ---- dx

// Rows [begin, end) of dx, and rows [first, last) of dy whose windows reach them.
struct RowsBack {
    int64_t begin, end, first, last;
};

// A task computes the gradients of some images for some channels of a group, or some rows of them
// for a single image. It sums them in double in planes with a border that holds every window.
// Windows that reach the rows of two tasks are computed by both.
struct Col2im : Im2col {
    int64_t images, channels;  // of a task
    int64_t row_parts;         // of an image
    int64_t block;             // pixels of dy per panel
    int64_t rows, row;         // of a plane

    int64_t image_parts() const { return divide_up(s.batch, images); }
    int64_t channel_parts() const { return divide_up(s.group_channels, channels); }
    int64_t tasks() const { return s.groups * image_parts() * channel_parts() * row_parts; }
    int64_t reach() const { return (s.kernel_h - 1) * s.dilate_h; }
    RowsBack rows_of(int64_t part) const {
        if (row_parts == 1) return {0, s.height, 0, s.out_height};
        const int64_t begin = s.height * part / row_parts, end = s.height * (part + 1) / row_parts;
        const int64_t before = begin + s.pad_h - reach(), behind = end + s.pad_h;
        const int64_t first = before > 0 ? divide_up(before, s.stride_h) : 0;
        const int64_t last = at_most(divide_up(behind, s.stride_h), s.out_height);
        return {begin, end, at_most(first, last), last};
    }
    int64_t kept() const { return images * channels * rows * row; }
    // Bytes per thread: planes, factors, a panel and a tile.
    template <class Sum>
    int64_t bytes() const {
        const int64_t factors = round_up(block, kOcPixels) * s.group_filters;
        const int64_t sums = factors + (s.group_filters + kOcPixels) * kPanel<Sum>;
        return bytes_of<double>(kept()) + bytes_of<Sum>(sums);
    }
};

inline Col2im plan_col2im(const Sweep& s) {
    Col2im plan = {{s}, 0, 0, 1, 0, 0, 0};
    plan.rows = (s.out_height - 1) * s.stride_h + plan.reach() + 1;
    plan.row = (s.out_width - 1) * s.stride_w + (s.kernel_w - 1) * s.dilate_w + 1;
    plan.channels = at_most(divide_up(256, plan.window()), s.group_channels);
    // Enough images to use weights more than once.
    plan.images = at_most(divide_up(128, plan.pixels()), s.batch);
    while (plan.images > 1 && (plan.tasks() < kLeastTasks || plan.kept() > kMostKept))
        plan.images = divide_up(plan.images, 2);
    while (plan.channels > 1 && plan.kept() > kMostKept)
        plan.channels = divide_up(plan.channels, 2);
    if (plan.images == 1 && plan.tasks() < kLeastTasks) {
        const int64_t shared = 1 + plan.reach() / s.stride_h;
        const int64_t parts = at_most(divide_up(kLeastTasks, plan.tasks()),
                                      s.out_height / (kLeastOwnRows * shared));
        plan.row_parts = parts < 1 ? 1 : parts;
    }
    const int64_t most = (1 << 16) / s.group_filters;
    plan.block = at_most(plan.images * plan.pixels(), most < 16 ? 16 : most > 256 ? 256 : most);
    return plan;
}

// Adds the patches of one tile to the planes; `pixel`: the first one, counted through the task.
template <class Sum>
void add_patches(const Col2im& plan, const Panel<Sum>& panel, int64_t channel, int64_t pixel,
                 int64_t count, const Sum* sums, double* planes) {
    const Sweep& s = plan.s;
    const int64_t plane = plan.rows * plan.row, step = s.dilate_w;
    int64_t offset[kPanel<Sum>];
    for (int64_t n = 0; n < panel.runs; ++n) {
        const TapRun& run = panel.run[n];
        const int64_t at = (run.channel - channel) * plane + run.p * s.dilate_h * plan.row;
        for (int64_t k = 0; k < run.count; ++k)
            offset[run.lane + k] = at + (run.q + k) * step;
    }
    const bool long_runs = step == 1 && s.kernel_w >= 8;
    for (int64_t n = 0; n < count; ++n, sums += panel.lanes()) {
        const int64_t of_image = (pixel + n) % plan.pixels();
        const int64_t i = of_image / s.out_width, j = of_image % s.out_width;
        double* to = planes + (pixel + n) / plan.pixels() * plan.channels * plane +
                     i * s.stride_h * plan.row + j * s.stride_w;
        if (long_runs)
            for (int64_t r = 0; r < panel.runs; ++r) {
                const TapRun& run = panel.run[r];
                double* place = to + offset[run.lane];
                for (int64_t k = 0; k < run.count; ++k) place[k] += sums[run.lane + k];
            }
        else
            for (int64_t k = 0; k < panel.count; ++k) to[offset[k]] += sums[k];
    }
}

template <class T, class Sum>
struct Col2imCall {
    const Col2im& plan;
    const Textbook& book;
    const T* w;
    const T* dy;
    T* dx;
    bool accumulate;

    // Copies `count` pixels of dy from `first` on, of a task that begins with image `image`, as
    // tiles of [filter][pixel].
    void copy_factors(int64_t group, int64_t image, int64_t first, int64_t count,
                      Sum* out) const {
        const Sweep& s = plan.s;
        const int64_t plane = plan.pixels(), tiles = divide_up(count, kOcPixels);
        for (int64_t tile = 0; tile < tiles; ++tile, out += kOcPixels * s.group_filters) {
            const int64_t begin = first + count * tile / tiles;
            const int64_t end = first + count * (tile + 1) / tiles;
            for (int64_t at = begin; at < end;) {
                const int64_t b = image + at / plane, pixel = at % plane;
                const int64_t run = at_most(end - at, plane - pixel);
                const T* from = dy + (b * s.groups + group) * s.group_filters * plane + pixel;
                Sum* to = out + at - begin;
                for (int64_t m = 0; m < s.group_filters; ++m, from += plane, to += kOcPixels)
                    for (int64_t k = 0; k < run; ++k) to[k] = from[k];
                at += run;
            }
        }
    }
    // Copies a panel's weights as [filter][lane].
    void copy_weights(int64_t group, const Panel<Sum>& panel, Sum* out) const {
        const T* from = w + group * plan.s.group_filters * plan.taps() + panel.first;
        for (int64_t m = 0; m < plan.s.group_filters; ++m, from += plan.taps()) {
            for (int64_t k = 0; k < panel.count; ++k) out[k] = from[k];
            for (int64_t k = panel.count; k < panel.lanes(); ++k) out[k] = 0;
            out += panel.lanes();
        }
    }
    // Stores some rows of a plane (one image, one channel) to a plane of dx.
    void put(double* plane, const RowsBack& some, T* to) const {
        const Sweep& s = plan.s;
        to += some.begin * s.width;
        for (int64_t y = some.begin; y < some.end; ++y, to += s.width) {
            const int64_t from = y + s.pad_h;
            double* line = plane + from * plan.row + s.pad_w;
            int64_t end = from < plan.rows ? at_most(s.width, plan.row - s.pad_w) : 0;
            if (end < 0) end = 0;
            if (!all_finite(line, end)) recompute_nonfinite(book, line, 1, end, to, 1);
            for (int64_t x = 0; x < s.width; ++x) {
                const double sum = x < end ? line[x] : 0;
                to[x] = static_cast<T>(accumulate ? to[x] + sum : sum);
            }
        }
    }

    // Clears the rows of the planes that a task's windows reach or that are stored to dx.
    void clear(double* planes, const RowsBack& some) const {
        const int64_t met = some.first * plan.s.stride_h, put = some.begin + plan.s.pad_h;
        const int64_t met_end = (some.last - 1) * plan.s.stride_h + plan.reach() + 1;
        const int64_t put_end = at_most(some.end + plan.s.pad_h, plan.rows);
        const int64_t begin = at_most(at_most(met, put), plan.rows);
        const int64_t count = (met_end > put_end ? met_end : put_end) - begin;
        for (int64_t n = 0; n < plan.images * plan.channels && count > 0; ++n)
            memset(planes + (n * plan.rows + begin) * plan.row, 0,
                   static_cast<size_t>(count * plan.row) * sizeof(double));
    }

    void run(int64_t task, void* memory) const {
        const Sweep& s = plan.s;
        const RowsBack some = plan.rows_of(task % plan.row_parts);
        task /= plan.row_parts;
        const int64_t first_channel = task % plan.channel_parts() * plan.channels;
        task /= plan.channel_parts();
        const int64_t image = task % plan.image_parts() * plan.images;
        const int64_t group = task / plan.image_parts();
        const int64_t channels = at_most(plan.channels, s.group_channels - first_channel);
        const int64_t images = at_most(plan.images, s.batch - image);
        // Only a single image is divided into parts of rows.
        const int64_t begin_pixel = some.first * s.out_width, plane = plan.rows * plan.row;
        const int64_t end_pixel = (images - 1) * plan.pixels() + some.last * s.out_width;
        const int64_t last = (first_channel + channels) * plan.window();
        double* planes = static_cast<double*>(memory);
        Sum* factors = reinterpret_cast<Sum*>(planes + plan.kept());
        Sum* weights = factors + round_up(plan.block, kOcPixels) * s.group_filters;
        Sum* sums = weights + s.group_filters * kPanel<Sum>;
        clear(planes, some);
        for (int64_t pixel = begin_pixel; pixel < end_pixel; pixel += plan.block) {
            const int64_t count = at_most(plan.block, end_pixel - pixel);
            const int64_t tiles = divide_up(count, kOcPixels);
            copy_factors(group, image, pixel, count, factors);
            for (int64_t tap = first_channel * plan.window(); tap < last; tap += kPanel<Sum>) {
                const Panel<Sum> panel(plan, tap, at_most(kPanel<Sum>, last - tap));
                copy_weights(group, panel, weights);
                for (int64_t tile = 0; tile < tiles; ++tile) {
                    const int64_t begin = count * tile / tiles, end = count * (tile + 1) / tiles;
                    sum_panel(factors + tile * kOcPixels * s.group_filters, end - begin,
                              kOcPixels, s.group_filters, weights, panel.vectors(), sums);
                    add_patches(plan, panel, first_channel, pixel + begin, end - begin, sums,
                                planes);
                }
            }
        }
        for (int64_t b = 0; b < images; ++b)
            for (int64_t c = 0; c < channels; ++c)
                put(planes + (b * plan.channels + c) * plane, some,
                    dx + (((image + b) * s.groups + group) * s.group_channels + first_channel + c) *
                             s.height * s.width);
    }
};

// The gradient for x; `s` describes the forward pass. False without memory; then nothing has been
// written.
template <class Sum, class T>
bool col2im(const Sweep& s, const Textbook& book, const T* w, const T* dy, T* dx,
            bool accumulate, int threads) {
    const Col2im plan = plan_col2im(s);
    const int64_t tasks = plan.tasks();
    const int used_threads = static_cast<int>(at_most(threads, tasks));
    const int64_t bytes = round_up(plan.bytes<Sum>(), 64);
    const Buffer<char> memory(used_threads * bytes);
    if (!memory) return false;
    Col2imCall<T, Sum> call = {plan, book, w, dy, dx, accumulate};
    parallel_for(used_threads, tasks, [&](int64_t task, int thread) {
        call.run(task, memory + thread * bytes);
    });
    return true;
}

// ---- dw

// A task is a panel of taps for some tiles of filters.
struct Im2colWeights : Im2col {
    int64_t tiles, tall;    // of filters per group, and the most filters of a tile
    int64_t panels, parts;  // of taps; of a group's tiles

    int64_t tasks() const { return s.groups * panels * parts; }
    int64_t first_tile(int64_t part) const { return tiles * part / parts; }
    int64_t first_filter(int64_t tile) const { return s.group_filters * tile / tiles; }
    int64_t most_filters() const { return tall * divide_up(tiles, parts); }
    int64_t factors() const { return tall * all_pixels(); }  // of a tile
};

template <class Sum>
Im2colWeights plan_of_weights(const Sweep& s) {
    Im2colWeights plan = {{s}, divide_up(s.group_filters, kOcPixels), 0, 0, 1};
    plan.tall = divide_up(s.group_filters, plan.tiles);
    plan.panels = divide_up(plan.taps(), kPanel<Sum>);
    if (plan.tasks() < kLeastTasks)
        plan.parts = at_most(divide_up(kLeastTasks, plan.tasks()), plan.tiles);
    return plan;
}

template <class T, class Sum>
struct Im2colWeightsCall {
    const Im2colWeights& plan;
    const Textbook& book;
    const T* x;
    const T* dy;
    T* dw;
    bool accumulate;
    Sum* factors;  // [group][tile][pixel][filter]

    // Bytes per thread: totals, the patches of a block of pixels, and a tile.
    int64_t bytes() const {
        const int64_t sums = (kSumBlock + kOcPixels) * kPanel<Sum>;
        return bytes_of<double>(plan.most_filters() * kPanel<Sum>) + bytes_of<Sum>(sums);
    }
    // Copies one image's dy for one tile.
    void copy_factors(int64_t index) const {
        const Sweep& s = plan.s;
        const int64_t plane = plan.pixels(), b = index % s.batch;
        const int64_t tile = index / s.batch % plan.tiles, group = index / s.batch / plan.tiles;
        const int64_t m = plan.first_filter(tile);
        const T* from = dy + ((b * s.groups + group) * s.group_filters + m) * plane;
        interleave(from, plane, plan.first_filter(tile + 1) - m, plan.tall, plane,
                   factors + (group * plan.tiles + tile) * plan.factors() + b * plane * plan.tall);
    }
    void copy_patches(int64_t group, const Panel<Sum>& panel, int64_t first, int64_t count,
                      Sum* out) const {
        const Sweep& s = plan.s;
        for (int64_t at = first; at < first + count; ++at, out += panel.lanes()) {
            const int64_t b = at / plan.pixels(), pixel = at % plan.pixels();
            const T* image = x + (b * s.groups + group) * s.group_channels * s.height * s.width;
            for (int64_t n = 0; n < panel.runs; ++n)
                copy_run(s, image, panel.run[n], pixel / s.out_width, pixel % s.out_width,
                         out + panel.run[n].lane);
            for (int64_t lane = panel.count; lane < panel.lanes(); ++lane)
                out[lane] = 0;
        }
    }
    void run(int64_t task, void* memory) const {
        const Sweep& s = plan.s;
        const int64_t part = task % plan.parts, group = task / plan.parts / plan.panels;
        const int64_t tap = task / plan.parts % plan.panels * kPanel<Sum>;
        const Panel<Sum> panel(plan, tap, at_most(kPanel<Sum>, plan.taps() - tap));
        const int64_t begin = plan.first_tile(part), end = plan.first_tile(part + 1);
        const int64_t lanes = panel.lanes(), first = plan.first_filter(begin);
        double* totals = static_cast<double*>(memory);
        Sum* patches = reinterpret_cast<Sum*>(totals + plan.most_filters() * kPanel<Sum>);
        Sum* sums = patches + kSumBlock * kPanel<Sum>;
        for (int64_t pixel = 0; pixel < plan.all_pixels(); pixel += kSumBlock) {
            const int64_t count = at_most(kSumBlock, plan.all_pixels() - pixel);
            copy_patches(group, panel, pixel, count, patches);
            for (int64_t tile = begin; tile < end; ++tile) {
                const int64_t m = plan.first_filter(tile), tall = plan.first_filter(tile + 1) - m;
                const Sum* own = factors + (group * plan.tiles + tile) * plan.factors();
                sum_panel(own + pixel * plan.tall, tall, plan.tall, count, patches,
                          panel.vectors(), sums);
                double* to = totals + (m - first) * lanes;
                if (pixel == 0)
                    for (int64_t k = 0; k < tall * lanes; ++k) to[k] = sums[k];
                else
                    for (int64_t k = 0; k < tall * lanes; ++k) to[k] += sums[k];
            }
        }
        T* to = dw + (group * s.group_filters + first) * plan.taps() + tap;
        for (int64_t m = first; m < plan.first_filter(end); ++m) {
            if (!all_finite(totals, panel.count)) recompute_nonfinite(book, totals, 1, panel.count, to, 1);
            for (int64_t k = 0; k < panel.count; ++k)
                to[k] = static_cast<T>(accumulate ? to[k] + totals[k] : totals[k]);
            to += plan.taps();
            totals += lanes;
        }
    }
};

// The gradient for w. False without memory; then nothing has been written.
template <class Sum, class T>
bool im2col_weights(const Sweep& s, const Textbook& book, const T* x, const T* dy, T* dw,
                    bool accumulate, int threads) {
    const Im2colWeights plan = plan_of_weights<Sum>(s);
    const int64_t tasks = plan.tasks(), tiles = s.groups * plan.tiles;
    const int used_threads = static_cast<int>(at_most(threads, tasks));
    Im2colWeightsCall<T, Sum> call = {plan, book, x, dy, dw, accumulate, nullptr};
    const int64_t bytes = round_up(call.bytes(), 64);
    const int64_t factors = bytes_of<Sum>(tiles * plan.factors());
    const Buffer<char> memory(used_threads * bytes + factors);
    if (!memory) return false;
    call.factors = reinterpret_cast<Sum*>(memory + used_threads * bytes);
    parallel_for(used_threads, tiles * s.batch, [&](int64_t index, int) { call.copy_factors(index); });
    parallel_for(used_threads, tasks, [&](int64_t task, int thread) {
        call.run(task, memory + thread * bytes);
    });
    return true;
}

// ---- y

// Filters and pixels of a task, and vectors of a patch per partial sum.
constexpr int64_t kDotsFilters = 16, kDotsPixels = 64, kDotBlock = 64;

struct Im2colDots : Im2col {
    int64_t filter_parts() const { return divide_up(s.group_filters, kDotsFilters); }
    int64_t pixel_parts() const { return divide_up(all_pixels(), kDotsPixels); }
    int64_t tasks() const { return s.groups * filter_parts() * pixel_parts(); }
};

template <class T, class Sum>
struct Im2colDotsCall {
    const Im2colDots& plan;
    const Textbook& book;
    const T* x;
    const T* w;
    const T* bias;
    T* y;
    bool accumulate;
    const Sum* patches;  // [group][pixel][tap]

    // Factors are summed in the type in which they are stored; all types have different sizes.
    static constexpr bool kSame = sizeof(T) == sizeof(Sum);
    static constexpr int64_t kTaps = kDotBlock * Lanes<Sum>::count;  // of a partial sum
    int64_t patch() const { return round_up(plan.taps(), Lanes<Sum>::count); }
    // Bytes per thread: some taps of the filters, and totals.
    static int64_t bytes() {
        return kDotsFilters * (bytes_of<Sum>(kTaps) + bytes_of<double>(kDotsPixels));
    }
    // Whether each image is its only patch.
    bool images_are_patches() const {
        const Sweep& s = plan.s;
        return kSame && is_one_window(s) && s.groups == 1 && patch() == plan.taps();
    }
    void copy_patch(int64_t index, Sum* all) const {
        const Sweep& s = plan.s;
        const int64_t at = index % plan.all_pixels(), group = index / plan.all_pixels();
        const int64_t b = at / plan.pixels(), pixel = at % plan.pixels();
        const T* image = x + (b * s.groups + group) * s.group_channels * s.height * s.width;
        Sum* out = all + index * patch();
        if (is_one_window(s)) {
            for (int64_t k = 0; k < plan.taps(); ++k) *out++ = image[k];
        } else {
            for (int64_t row = 0; row < s.group_channels * s.kernel_h; ++row, out += s.kernel_w)
                copy_run(s, image, {row / s.kernel_h, row % s.kernel_h, 0, 0, s.kernel_w},
                         pixel / s.out_width, pixel % s.out_width, out);
        }
        for (int64_t k = plan.taps(); k < patch(); ++k) *out++ = 0;
    }
    // Copies some taps of filters as [filter][lane], with zeros behind them.
    void copy_weights(const T* from, int64_t filters, int64_t count, int64_t wide, Sum* to) const {
        for (int64_t m = 0; m < filters; ++m, from += plan.taps(), to += wide) {
            for (int64_t k = 0; k < count; ++k) to[k] = from[k];
            for (int64_t k = count; k < wide; ++k) to[k] = 0;
        }
    }
    void run(int64_t task, void* memory) const {
        const Sweep& s = plan.s;
        const int64_t pixel = task % plan.pixel_parts() * kDotsPixels;
        task /= plan.pixel_parts();
        const int64_t filter = task % plan.filter_parts() * kDotsFilters;
        const int64_t group = task / plan.filter_parts();
        const int64_t pixels = at_most(kDotsPixels, plan.all_pixels() - pixel);
        const int64_t filters = at_most(kDotsFilters, s.group_filters - filter);
        double* totals = static_cast<double*>(memory);
        Sum* weights = reinterpret_cast<Sum*>(totals + kDotsFilters * kDotsPixels);
        const Sum* rows = patches + (group * plan.all_pixels() + pixel) * patch();
        const T* from = w + (group * s.group_filters + filter) * plan.taps();
        memset(totals, 0, kDotsFilters * kDotsPixels * sizeof(double));
        for (int64_t tap = 0; tap < plan.taps(); tap += kTaps) {
            const int64_t count = at_most(kTaps, plan.taps() - tap);
            const int64_t vectors = divide_up(count, Lanes<Sum>::count);
            const int64_t wide = vectors * Lanes<Sum>::count;
            const Sum* factors = weights;
            int64_t step = wide;
            if (kSame && count == wide) {
                factors = reinterpret_cast<const Sum*>(from) + tap;
                step = plan.taps();
            } else {
                copy_weights(from + tap, filters, count, wide, weights);
            }
            DotTile<Sum> tile = {{}, nullptr, step, 1, vectors, 0, 0, nullptr, kDotsPixels, {}, nullptr};
            for (int64_t n = 0; n < pixels; n += kDotTaps) {
                const int64_t columns = at_most(pixels - n, kDotTaps);
                for (int64_t k = 0; k < columns; ++k) tile.tap[k] = rows + (n + k) * patch() + tap;
                for (int64_t m = 0; m < filters; m += kDotFilters) {
                    tile.dy = factors + m * step;
                    tile.totals = totals + m * kDotsPixels + n;
                    pick_dot_tile<Sum>(at_most(filters - m, kDotFilters), columns)(tile);
                }
            }
        }
        for (int64_t m = 0; m < filters; ++m) {
            const int64_t of = group * s.group_filters + filter + m;
            const double offset = bias ? static_cast<double>(bias[of]) : 0;
            int64_t b = pixel / plan.pixels(), at = pixel % plan.pixels();
            for (int64_t n = 0; n < pixels; ++n) {
                T* to = y + (b * s.groups * s.group_filters + of) * plan.pixels() + at;
                if (++at == plan.pixels()) at = 0, ++b;
                const double sum = book.finite_or_textbook(totals[m * kDotsPixels + n], to) + offset;
                *to = static_cast<T>(accumulate ? *to + sum : sum);
            }
        }
    }
};

// The forward pass; `bias` may be null. False without memory; then nothing has been written.
template <class Sum, class T>
bool im2col_dots(const Sweep& s, const Textbook& book, const T* x, const T* w, const T* bias,
                 T* y, bool accumulate, int threads) {
    const Im2colDots plan = {{s}};
    const int64_t tasks = plan.tasks(), patches = s.groups * plan.all_pixels();
    Im2colDotsCall<T, Sum> call = {plan, book, x, w, bias, y, accumulate, nullptr};
    const int64_t bytes = round_up(call.bytes(), 64);
    const bool copies = !call.images_are_patches();
    const int64_t copied = copies ? bytes_of<Sum>(patches * call.patch()) : 0;
    const Buffer<char> memory(threads * bytes + copied);
    if (!memory) return false;
    if (copies) {
        Sum* const all = reinterpret_cast<Sum*>(memory + threads * bytes);
        parallel_for(threads, patches, [&](int64_t index, int) { call.copy_patch(index, all); });
        call.patches = all;
    } else {
        call.patches = reinterpret_cast<const Sum*>(x);
    }
    parallel_for(threads, tasks, [&](int64_t task, int thread) {
        call.run(task, memory + thread * bytes);
    });
    return true;
}

}  // namespace
}  // namespace ece408
