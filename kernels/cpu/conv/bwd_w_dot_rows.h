// Copies of x and dy for conv_bwd_w_dot.cpp, chunk by chunk, plain or transformed.
#pragma once

#include <string.h>

#include <type_traits>

#include "conv/bwd_w_dot_plan.h"
#include "conv/textbook.h"
#include "micro/row_copy.h"

namespace ece408 {
namespace {

// Copies a run of pixels. Up to a vector less one of other numbers may be written behind them.
template <class T, class Sum>
void copy_run(const T* source, int64_t count, Sum* out) {
    RowCopy<T, Sum>({1, 0, count, count})(source, out);
}

// Rows of one phase of a channel.
struct PhaseRows {
    int64_t y, x;  // the phase
    int64_t first, count;
};

// Copies rows; those of `out` are `step` elements apart.
template <class T, class Sum>
void copy_phase(const WeightPlan& plan, const T* source, const PhaseRows& rows, int64_t step, Sum* out) {
    const Sweep& s = plan.s;
    // Pixel k of a row is column k * stride_w - before of the image.
    const int64_t before = s.pad_w - rows.x, behind = before + s.width;
    int64_t begin = before > 0 ? divide_up(before, s.stride_w) : 0;
    int64_t end = behind > 0 ? divide_up(behind, s.stride_w) : 0;
    if (end > plan.f.row) end = plan.f.row;
    if (begin > end) begin = end = 0;
    const RowCopy<T, Sum> copy = {{s.stride_w, begin, end, plan.f.row}};
    const RowCopy<T, Sum> border = {{1, 0, 0, plan.f.row}};
    for (int64_t k = rows.first; k < rows.first + rows.count; ++k, out += step) {
        const int64_t y = rows.y + k * s.stride_h - s.pad_h;
        if (inside(y, s.height) && begin < end)
            copy(source + y * s.width - before, out);
        else
            border(source, out);
    }
}

// The layout of a component's row.
struct ComponentSource {
    int64_t left, width;  // zeros before the pixels, and pixels
    int64_t count;        // elements of the row, with zeros behind the pixels
};

// Writes rows of the four components one behind the other, by aligned vectors: lanes left over from
// a row become the first lanes of the next.
class ComponentRows {
public:
    ComponentRows(float* out, int64_t component) : out_(out), component_(component) {}

    // Adds a row. `make` turns a vector of each source row into one of each component. Null rows
    // are zeros.
    template <int ROWS, class Make>
    void add(const ComponentSource& source, const float* const (&rows)[ROWS], const Make& make) {
        const int64_t left = source.left, count = source.count, all = left + source.width;
        const int64_t end = all < count ? all : count;
        bool whole = true;
        for (int r = 0; r < ROWS; ++r) whole = whole && rows[r];
        Vec of[ROWS], components[kComponents];
        for (int64_t k = -kept_lanes_;; k += kLanes) {
            for (; whole && k >= left && k + kLanes <= end; k += kLanes) {
                ECE408_UNROLL
                for (int r = 0; r < ROWS; ++r) of[r] = load(rows[r] + k - left);
                make(of, components);
                put(components);
            }
            kept_lanes_ = count - k;
            if (kept_lanes_ <= 0) break;
            const Mask inside = lanes_between(lane(left - k), lane(end - k));
            ECE408_UNROLL
            for (int r = 0; r < ROWS; ++r)
                of[r] = rows[r] ? load_only(inside, rows[r] + k - left) : broadcast(0.0f);
            make(of, components);
            ECE408_UNROLL
            for (int d = 0; d < kComponents && k < 0; ++d) components[d] += kept_[d];
            if (kept_lanes_ < kLanes) {
                ECE408_UNROLL
                for (int d = 0; d < kComponents; ++d) kept_[d] = components[d];
                return;
            }
            put(components);
        }
        kept_lanes_ = 0;
    }
    // Adds `zeros` zeros, and more up to a whole vector.
    void end(int64_t zeros) {
        const Vec none[kComponents] = {};
        int64_t left = kept_lanes_ + zeros;
        if (kept_lanes_ > 0) put(kept_), left -= kLanes;
        for (; left > 0; left -= kLanes) put(none);
        kept_lanes_ = 0;
    }

private:
    static int lane(int64_t k) { return static_cast<int>(k < 0 ? 0 : k > kLanes ? kLanes : k); }
    void put(const Vec (&components)[kComponents]) {
        ECE408_UNROLL
        for (int d = 0; d < kComponents; ++d) store(out_ + d * component_, components[d]);
        out_ += kLanes;
    }

    float* out_;
    int64_t component_, kept_lanes_ = 0;
    Vec kept_[kComponents] = {};
};

// Some rows of a plane, in float, `step` elements apart.
struct PlaneRows {
    const float* first;
    Span rows;
    int64_t step;

    const float* row(int64_t y) const {
        return y >= rows.begin && y < rows.end ? first + (y - rows.begin) * step : nullptr;
    }
};

// `scratch`: room for rows of another type.
template <class T>
PlaneRows rows_of_plane(const T* plane, int64_t width, const Span& rows, float* scratch) {
    const T* const first = plane + rows.begin * width;
    if constexpr (std::is_same<T, float>::value) {
        return {first, rows, width};
    } else {
        copy_run(first, rows.count() * width, scratch);
        return {scratch, rows, width};
    }
}

// Transforms the four rows of x that each of `row_pairs` row pairs meets; `top`: the first one.
inline void add_x_rows(const ComponentSource& source, const PlaneRows& rows, int64_t top, int64_t row_pairs,
                       ComponentRows* out) {
    for (int64_t y = top; y < top + 2 * row_pairs; y += 2)
        out->add(source, {rows.row(y), rows.row(y + 1), rows.row(y + 2), rows.row(y + 3)},
                 [](const Vec(&x)[4], Vec(&components)[kComponents]) {
                     components[0] = x[0] - x[2];
                     components[1] = x[1] + x[2];
                     components[2] = x[2] - x[1];
                     components[3] = x[3] - x[1];
                 });
}

// Transforms a chunk of one channel of x.
template <class T>
void transform_channel(const WeightPlan& plan, const T* x, const Chunk& chunk, float* scratch,
                       float* out) {
    const Sweep& s = plan.s;
    const int64_t row_pairs = chunk.rows.count() + plan.halo, top = 2 * chunk.rows.begin - s.pad_h;
    const int64_t bottom = top + 2 * row_pairs + 2;
    Span some = {top > 0 ? top : 0, bottom < s.height ? bottom : s.height};
    if (some.end < some.begin) some.end = some.begin;
    ComponentRows components(out, plan.f.phase);
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        const PlaneRows rows = rows_of_plane(x + b * plan.image_of_x(), s.width, some, scratch);
        add_x_rows({s.pad_w, s.width, plan.f.row}, rows, top, row_pairs, &components);
        if (!plan.joined() || b + 1 == chunk.images.end) components.end(plan.tail);
    }
}

// The same with a stride: copies the rows of a phase first.
template <class T>
void transform_phase(const WeightPlan& plan, const T* x, const Chunk& chunk, int64_t phase,
                     float* scratch, float* out) {
    const int64_t row_pairs = chunk.rows.count() + plan.halo, step = plan.copied_row(kLanes);
    const PhaseRows rows = {phase / plan.s.stride_w, phase % plan.s.stride_w, 2 * chunk.rows.begin,
                            2 * row_pairs + 2};
    ComponentRows components(out, plan.f.phase);
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        copy_phase(plan, x + b * plan.image_of_x(), rows, step, scratch);
        add_x_rows({0, plan.f.row, plan.f.row}, {scratch, {0, rows.count}, step}, 0, row_pairs, &components);
        if (!plan.joined() || b + 1 == chunk.images.end) components.end(plan.tail);
    }
}

// Transforms a chunk of one filter's dy.
template <class T>
void transform_filter(const WeightPlan& plan, const T* dy, const Chunk& chunk, float* scratch,
                      float* out) {
    const Sweep& s = plan.s;
    const Span some = plan.rows_of(chunk);
    ComponentRows components(out, plan.dy_row);
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        const PlaneRows rows = rows_of_plane(dy + b * plan.image_of_dy(), s.out_width, some, scratch);
        // The last row may lack a second one.
        for (int64_t y = some.begin; y < some.end; y += 2)
            components.add({0, s.out_width, plan.f.row}, {rows.row(y), rows.row(y + 1)},
                           [](const Vec(&dy_rows)[2], Vec(&made)[kComponents]) {
                            made[0] = dy_rows[0];
                            made[1] = dy_rows[0] + dy_rows[1];
                            made[2] = dy_rows[0] - dy_rows[1];
                            made[3] = dy_rows[1];
                        });
        if (!plan.joined() || b + 1 == chunk.images.end) components.end(0);
    }
}

// Copies a chunk of one channel; `x`: the channel's plane in the batch's first image.
template <class T, class Sum>
void copy_channel(const WeightPlan& plan, const T* x, const Chunk& chunk, Sum* scratch,
                  Sum* out) {
    if constexpr (std::is_same<Sum, float>::value) {
        if (plan.winograd && !plan.strides()) return transform_channel(plan, x, chunk, scratch, out);
        if (plan.winograd) {
            for (int64_t phase = 0; phase < plan.s.stride_h * plan.s.stride_w; ++phase)
                if (has_taps(phase % plan.s.stride_w, plan.s.kernel_w, plan.s.stride_w, plan.s.dilate_w))
                    transform_phase(plan, x, chunk, phase, scratch, out + phase * kComponents * plan.f.phase);
            return;
        }
    }
    const Sweep& s = plan.s;
    const int64_t image = plan.image_of_x(), rows = chunk.rows.count() + plan.halo;
    for (int64_t y = 0; y < s.stride_h; ++y) {
        if (!has_taps(y, s.kernel_h, s.stride_h, s.dilate_h)) continue;
        for (int64_t v = 0; v < s.stride_w; ++v) {
            if (!has_taps(v, s.kernel_w, s.stride_w, s.dilate_w)) continue;
            Sum* to = out + (y * s.stride_w + v) * plan.f.phase;
            for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
                if (plan.copies_whole()) {
                    copy_run(x + b * image + chunk.rows.begin * s.width, rows * s.width, to);
                    to += plan.x_image;
                    continue;
                }
                copy_phase(plan, x + b * image, {y, v, chunk.rows.begin, rows}, plan.f.row, to);
                memset(to + rows * plan.f.row, 0, static_cast<size_t>(plan.tail) * sizeof(Sum));
                to += plan.x_image;
            }
        }
    }
}

// Copies a chunk of one filter's dy; `dy`: the filter's plane in the batch's first image.
template <class T, class Sum>
void copy_filter(const WeightPlan& plan, const T* dy, const Chunk& chunk, Sum* scratch,
                 Sum* out) {
    if constexpr (std::is_same<Sum, float>::value) {
        if (plan.winograd) return transform_filter(plan, dy, chunk, scratch, out);
    }
    const Sweep& s = plan.s;
    const int64_t image = plan.image_of_dy();
    const int64_t lanes = Lanes<Sum>::count;
    Sum* const start = out;
    const auto end_run = [&] {
        for (; (out - start) % lanes != 0; ++out) *out = 0;
    };
    const RowCopy<T, Sum> copy = {{1, 0, s.out_width, plan.f.row}};
    for (int64_t b = chunk.images.begin; b < chunk.images.end; ++b) {
        const T* from = dy + b * image + chunk.rows.begin * s.out_width;
        if (plan.f.row == s.out_width) {
            copy_run(from, chunk.rows.count() * plan.f.row, out);
            out += chunk.rows.count() * plan.f.row;
        } else {
            for (int64_t i = 0; i < chunk.rows.count(); ++i, from += s.out_width) {
                copy(from, out);
                out += plan.f.row;
            }
        }
        if (!plan.joined()) end_run();
    }
    end_run();
}

// Prefetches rows of some planes of some images, a number of lines per call.
class RowPrefetch {
public:
    RowPrefetch() = default;
    template <class T>
    RowPrefetch(const T* first, int64_t planes, int64_t plane, int64_t images, int64_t image,
                int64_t rows, int64_t row, int64_t pixels)
        : at_(reinterpret_cast<const char*>(first)), planes_(planes), images_(images), rows_(rows),
          lines_(divide_up(pixels * size<T>(), kLineBytes)), plane_(plane * size<T>()),
          image_(image * size<T>()), row_(row * size<T>()) {}

    int64_t lines() const { return planes_ * images_ * rows_ * lines_; }
    void issue(int64_t count) {
        while (count > 0 && next_plane_ < planes_) {
            const char* const row = at_ + next_plane_ * plane_ + next_image_ * image_ + next_row_ * row_;
            const int64_t left = lines_ - next_line_, some = count < left ? count : left;
            const int64_t end = next_line_ + some;
            for (int64_t line = next_line_; line < end; ++line)
                __builtin_prefetch(row + line * kLineBytes, 0, 2);
            count -= some, next_line_ = end;
            if (next_line_ < lines_) return;
            next_line_ = 0;
            if (++next_row_ < rows_) continue;
            next_row_ = 0;
            if (++next_image_ < images_) continue;
            next_image_ = 0;
            ++next_plane_;
        }
    }

private:
    static constexpr int64_t kLineBytes = kLine * static_cast<int64_t>(sizeof(float));
    template <class T>
    static constexpr int64_t size() {
        return static_cast<int64_t>(sizeof(T));
    }

    const char* at_ = nullptr;
    int64_t planes_ = 0, images_ = 0, rows_ = 0, lines_ = 0;
    int64_t plane_ = 0, image_ = 0, row_ = 0;
    int64_t next_plane_ = 0, next_image_ = 0, next_row_ = 0, next_line_ = 0;
};

}  // namespace
}  // namespace ece408
