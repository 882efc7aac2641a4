// Any convolution, forward and backward, in three types, in whichever way is estimated to be the
// fastest. It is compiled once per instruction set, with ECE408_ISA its name and ECE408_LANES the
// floats in one of its vectors, and only the table at the end is not local.
#include "general.h"

#include "filters_as_lanes.h"
#include "filters_as_lanes_weight.h"
#include "general_costs.h"
#include "patches.h"
#include "shape.h"
#include "pixels_as_lanes.h"
#include "weight_sums.h"

namespace ece408 {
namespace {

Sweep forward_sweep(const Shape& s) {
    Sweep sweep;
    sweep.batch = s.batch;
    sweep.groups = s.groups;
    sweep.in_channels = s.group_channels;
    sweep.out_channels = s.group_filters;
    sweep.height = s.height;
    sweep.width = s.width;
    sweep.out_height = s.out_height;
    sweep.out_width = s.out_width;
    sweep.kernel_h = s.kernel_h;
    sweep.kernel_w = s.kernel_w;
    // A single output row has no next one: its stride, of whatever size, means nothing.
    sweep.stride_h = s.out_height > 1 ? s.stride_h : 1;
    sweep.stride_w = s.out_width > 1 ? s.stride_w : 1;
    sweep.dilate_h = s.dilate_h;
    sweep.dilate_w = s.dilate_w;
    sweep.pad_h = s.pad_h;
    sweep.pad_w = s.pad_w;
    sweep.spread_h = sweep.spread_w = 1;
    return sweep;
}

// x's gradient: dy, spread by the stride, swept with the kernel turned round, so that each pixel
// of x meets every output that read it.
Sweep backward_sweep(const Shape& s) {
    Sweep sweep = forward_sweep(s);
    sweep.in_channels = s.group_filters;
    sweep.out_channels = s.group_channels;
    sweep.height = s.out_height;
    sweep.width = s.out_width;
    sweep.out_height = s.height;
    sweep.out_width = s.width;
    sweep.spread_h = sweep.stride_h;
    sweep.spread_w = sweep.stride_w;
    sweep.stride_h = sweep.stride_w = 1;
    sweep.pad_h = (s.kernel_h - 1) * s.dilate_h - s.pad_h;
    sweep.pad_w = (s.kernel_w - 1) * s.dilate_w - s.pad_w;
    return sweep;
}

// Pixels of a batch from which on its convolutions are taken by pairs of rows.
constexpr int64_t kPairPixels = 100;

// Whether filters are better lanes than pixels: enough of them, and sums that pay for the
// transposition of the result; with a stride, pixels as lanes must be laid out first.
bool is_deep(const Shape& s, int64_t filters, int64_t channels) {
    const bool strided = s.stride_h > 1 || s.stride_w > 1;
    return filters >= ECE408_LANES &&
           channels * s.kernel_h * s.kernel_w >= (strided ? 48 : 128);
}

// Whether a deep sum is worth taking two output rows at a time: without strides, and with pixels
// enough to pay for a third more weights.
bool by_pairs(const Shape& s) {
    const bool plain = s.stride_h == 1 && s.stride_w == 1 && s.dilate_h == 1;
    const int64_t reach = (s.kernel_w - 1) * s.dilate_w;
    const bool fits = has_pairs(s.kernel_h) && s.kernel_h * s.kernel_w <= kDeepPairTaps;
    return plain && fits && s.pad_h < s.kernel_h && s.pad_w <= reach &&
           s.batch * s.out_height * s.out_width >= kPairPixels;
}

int status(bool done) { return done ? ECE408_OK : ECE408_NO_MEMORY; }

template <class T, class WeightAt>
int sweep(const Sweep& s, WeightAt weight_at, const Textbook& book, const T* source,
          const T* bias, T* out, bool accumulate, int threads) {
    using Sum = typename Number<T>::Sum;
    SweepPlan<Sum> plan = {};
    plan.book = book;
    bool done = make_plan(s, weight_at, &plan);
    done = done && run_sweep<T, Sum>(plan, source, bias, out, accumulate, threads);
    free(plan.taps);
    free(plan.weights);
    return status(done);
}

template <class T>
int deep(bool ready, const Deep& d, const DeepWeights<T>& weights, const Textbook& book,
         const T* source, const T* bias, T* out, bool accumulate, int threads) {
    using Sum = typename Number<T>::Sum;
    ready = ready && run_deep<T, Sum>(d, weights, book, source, bias, out, accumulate, threads);
    free(d.memory);
    return status(ready);
}

// The type of an array's elements: half precision comes as its bits.
template <class T>
struct Typed {
    using Type = T;
};
template <>
struct Typed<uint16_t> {
    using Type = Half;
};
template <class T>
using Stored = typename Typed<T>::Type;
template <class T>
const Stored<T>* typed(const T* p) { return reinterpret_cast<const Stored<T>*>(p); }
template <class T>
Stored<T>* typed(T* p) { return reinterpret_cast<Stored<T>*>(p); }
template <class T>
using SumOf = typename Number<Stored<T>>::Sum;

// What patches may take of memory, in images.
constexpr int64_t kMostPatches = 4;

template <class T>
int forward(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
            bool accumulate, int threads) {
    const Shape s = derive(problem);
    const auto* weights = typed(w);
    auto weight_at = [&](int64_t g, int64_t m, int64_t c, int64_t p, int64_t q) {
        const int64_t filter = g * s.group_filters + m;
        return widen(weights[((filter * s.group_channels + c) * s.kernel_h + p) * s.kernel_w + q]);
    };
    const Textbook book = {s, x, w, y, forward_element<Stored<T>>};
    const Sweep across = forward_sweep(s);
    const bool has_lanes = is_deep(s, s.group_filters, s.group_channels);
    const Costs<SumOf<T>> costs(across, has_lanes);
    if (costs.pixels * costs.taps <= kMostPatches * costs.source &&
        costs.forward_patches() < costs.forward_sliding())
        return status(multiply_patches<SumOf<T>>(across, book, typed(x), weights, typed(bias),
                                                 typed(y), accumulate, threads));
    if (has_lanes) {
        const int64_t filter = s.group_channels * s.kernel_h * s.kernel_w;
        Deep d;
        const bool ready =
            by_pairs(s) ? deep_by_pairs(across, false, &d) : deep_forward(across, &d);
        return deep(ready, d,
                    {weights, s.group_filters * filter, filter, s.kernel_h * s.kernel_w,
                     s.kernel_w},
                    book, typed(x), typed(bias), typed(y), accumulate, threads);
    }
    return sweep(across, weight_at, book, typed(x), typed(bias), typed(y), accumulate, threads);
}

template <class T>
int backward_data(const ece408_problem& problem, const T* w, const T* dy, T* dx, bool accumulate,
                  int threads) {
    const Shape s = derive(problem);
    const auto* weights = typed(w);
    const decltype(typed(dy)) none = nullptr;
    const Textbook book = {s, w, dy, dx, data_element<Stored<T>>};
    const bool has_lanes = is_deep(s, s.group_channels, s.group_filters);
    const Costs<SumOf<T>> costs(forward_sweep(s), has_lanes);
    if (costs.data_patches() < costs.data_sliding())
        return status(put_back_patches<SumOf<T>>(costs.s, book, weights, typed(dy), typed(dx),
                                                 accumulate, threads));
    if (has_lanes) {
        const int64_t window = s.kernel_h * s.kernel_w, filter = s.group_channels * window;
        Deep d;
        const bool ready = by_pairs(s) ? deep_by_pairs(backward_sweep(s), true, &d)
                                       : deep_backward(forward_sweep(s), &d);
        return deep(ready, d,
                    {weights, s.group_filters * filter, window, filter, s.kernel_w}, book,
                    typed(dy), none, typed(dx), accumulate, threads);
    }
    auto weight_at = [&](int64_t g, int64_t c, int64_t m, int64_t p, int64_t q) {
        const int64_t filter = g * s.group_filters + m;
        const int64_t turned = (s.kernel_h - 1 - p) * s.kernel_w + s.kernel_w - 1 - q;
        const int64_t window = s.kernel_h * s.kernel_w;
        return widen(weights[(filter * s.group_channels + c) * window + turned]);
    };
    return sweep(backward_sweep(s), weight_at, book, typed(dy), none, typed(dx), accumulate,
                 threads);
}

template <class T>
int backward_weight(const ece408_problem& problem, const T* x, const T* dy, T* dw,
                    bool accumulate, int threads) {
    using Sum = SumOf<T>;
    const Shape shape = derive(problem);
    const Sweep s = forward_sweep(shape);
    const Textbook book = {shape, x, dy, dw, weight_element<Stored<T>>};
    const Costs<Sum> costs(s, false);
    if (costs.weight_patches() < costs.weight_sliding())
        return status(
            sum_patches<Sum>(s, book, typed(x), typed(dy), typed(dw), accumulate, threads));
    if (s.out_channels >= kDeepLeastFilters)
        return status(run_deep_weight<Sum>(s, book, typed(x), typed(dy), typed(dw), accumulate,
                                           threads));
    return status(
        run_weight_sums<Sum>(s, book, typed(x), typed(dy), typed(dw), accumulate, threads));
}

}  // namespace

#define ECE408_JOIN_(a, b) a##b
#define ECE408_JOIN(a, b) ECE408_JOIN_(a, b)

extern const GeneralKernels ECE408_JOIN(general_, ECE408_ISA) = {
    {forward<float>, backward_data<float>, backward_weight<float>},
    {forward<double>, backward_data<double>, backward_weight<double>},
    {forward<uint16_t>, backward_data<uint16_t>, backward_weight<uint16_t>},
};

}  // namespace ece408
