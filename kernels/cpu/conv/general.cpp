// The kernels for any convolution, forward and backward, in three types, and once more for float
// with products and sums in double. It is compiled once per instruction set, with ECE408_ISA its name
// and ECE408_LANES the floats in one of its vectors, and only the constants at the end are not local.
#include "api/kernels.h"
#include "conv/conv_bwd_w_ic.h"
#include "conv/conv_fwd_oc.h"
#include "conv/conv_fwd_ow.h"
#include "conv/im2col.h"

namespace ece408 {
namespace {

int status(bool done) { return done ? ECE408_OK : ECE408_NO_MEMORY; }

template <class T>
using SumOf = typename Number<T>::Sum;

template <class T, class Sum = SumOf<T>>
int pixels_forward(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
                   bool accumulate, int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, w, y, forward_element<T>};
    const auto weight_at = [&](int64_t g, int64_t m, int64_t c, int64_t p, int64_t q) {
        return widen(w[w_index(s, g * s.group_filters + m, c, p, q)]);
    };
    return status(
        run_sweep<Sum>(forward_sweep(s), weight_at, book, x, bias, y, accumulate, threads));
}

template <class T, class Sum = SumOf<T>>
int pixels_data(const ece408_problem& problem, const T* w, const T* dy, T* dx, bool accumulate,
                int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, w, dy, dx, data_element<T>};
    const T* const no_bias = nullptr;
    const auto weight_at = [&](int64_t g, int64_t c, int64_t m, int64_t p, int64_t q) {
        const int64_t row = s.kernel_h - 1 - p, column = s.kernel_w - 1 - q;
        return widen(w[w_index(s, g * s.group_filters + m, c, row, column)]);
    };
    return status(
        run_sweep<Sum>(backward_sweep(s), weight_at, book, dy, no_bias, dx, accumulate, threads));
}

// Where images are rows that lie in memory as such, tiles of pixels can cut these evenly.
Sweep forward_rows(const ece408_problem& p) {
    return forward_sweep(derive(p.stride_h == 1 && p.stride_w == 1 ? flattened(p) : p));
}

// What conv_fwd_oc.h takes at once: outputs by their taps, pairs of rows or columns, or squares.
enum class By { taps, pairs, squares };

template <By BY>
bool forward_deep(const ece408_problem& problem, Deep* deep) {
    const Sweep sweep = forward_rows(problem);
    return BY == By::taps ? deep_forward(sweep, deep)
                          : deep_by_pairs(sweep, false, BY == By::squares, deep);
}

// Where the forward pass finds a filter's weights.
template <class T>
DeepWeights<T> forward_weights(const Shape& s, const T* w) {
    const int64_t window = s.kernel_h * s.kernel_w, filter = s.group_channels * window;
    return {w, s.group_filters * filter, filter, window};
}

// `packed`: the weights as `filters_pack` leaves them, or null.
template <class T, By BY, class Sum>
int filters_by(const ece408_problem& problem, const T* x, const T* w, const Sum* packed,
               const DeepEnd<T>& end, T* y, int threads) {
    const Shape s = derive(problem);
    Deep deep;
    if (!forward_deep<BY>(problem, &deep)) return ECE408_NO_MEMORY;
    DeepPlan<T, Sum> plan(deep, forward_weights(s, w), {s, x, w, y, forward_element<T>});
    return status(run_deep(&plan, packed, x, end, y, threads));
}

template <class T, By BY, class Sum = SumOf<T>>
int filters_forward(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
                    bool accumulate, int threads) {
    const Sum* const packed = nullptr;
    return filters_by<T, BY>(problem, x, w, packed, {bias, accumulate, {}}, y, threads);
}

template <By BY>
int filters_forward_packed(const ece408_problem& problem, const float* x, const float* w,
                           const float* bias, const float* packed, const ece408_finish& finish,
                           float* y, int threads) {
    return filters_by<float, BY>(problem, x, w, packed, {bias, false, finish}, y, threads);
}

template <By BY>
int64_t filters_packed_floats(const ece408_problem& problem) {
    Deep deep;
    if (!forward_deep<BY>(problem, &deep)) return 0;
    const DeepPlan<float, float> plan(deep, {}, {});
    return plan.units() * plan.packed();
}

template <By BY>
int filters_pack(const ece408_problem& problem, const float* w, const float*, float* packed,
                 int threads) {
    const Shape s = derive(problem);
    Deep deep;
    if (!forward_deep<BY>(problem, &deep)) return ECE408_NO_MEMORY;
    const DeepPlan<float, float> plan(deep, forward_weights(s, w), {});
    pack_deep(plan, packed, threads);
    return ECE408_OK;
}

template <class T, By BY, class Sum = SumOf<T>>
int filters_data(const ece408_problem& problem, const T* w, const T* dy, T* dx, bool accumulate,
                 int threads) {
    const Shape s = derive(problem);
    const int64_t window = s.kernel_h * s.kernel_w, filter = s.group_channels * window;
    const DeepWeights<T> weights = {w, s.group_filters * filter, window, filter};
    const Sum* const no_packed = nullptr;
    Deep deep;
    const bool ready = BY == By::taps ? deep_backward(forward_rows(problem), &deep)
                                      : deep_by_pairs(backward_sweep(s), true, BY == By::squares, &deep);
    if (!ready) return ECE408_NO_MEMORY;
    DeepPlan<T, Sum> plan(deep, weights, {s, w, dy, dx, data_element<T>});
    return status(run_deep(&plan, no_packed, dy, {nullptr, accumulate, {}}, dx, threads));
}

template <class T, class Sum = SumOf<T>>
int patches_forward(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
                    bool accumulate, int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, w, y, forward_element<T>};
    return status(
        multiply_patches<Sum>(forward_sweep(s), book, x, w, bias, y, accumulate, threads));
}

template <class T, class Sum = SumOf<T>>
int patches_data(const ece408_problem& problem, const T* w, const T* dy, T* dx, bool accumulate,
                 int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, w, dy, dx, data_element<T>};
    return status(put_back_patches<Sum>(forward_sweep(s), book, w, dy, dx, accumulate, threads));
}

template <class T, class Sum = SumOf<T>>
int patches_weight(const ece408_problem& problem, const T* x, const T* dy, T* dw, bool accumulate,
                   int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, dy, dw, weight_element<T>};
    return status(sum_patches<Sum>(forward_sweep(s), book, x, dy, dw, accumulate, threads));
}

template <class T, class Sum = SumOf<T>>
int channels_weight(const ece408_problem& problem, const T* x, const T* dy, T* dw, bool accumulate,
                    int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, dy, dw, weight_element<T>};
    return status(sum_by_channels<Sum>(s, book, x, dy, dw, accumulate, threads));
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(pixels_as_lanes) = {
    {pixels_forward<float>, pixels_data<float>, nullptr},
    {pixels_forward<double>, pixels_data<double>, nullptr},
    {pixels_forward<Half>, pixels_data<Half>, nullptr},
    {pixels_forward<float, double>, pixels_data<float, double>, nullptr},
};
extern const Kernel ECE408_THIS_BUILD(filters_as_lanes) = {
    {filters_forward<float, By::taps>, filters_data<float, By::taps>, nullptr},
    {filters_forward<double, By::taps>, filters_data<double, By::taps>, nullptr},
    {filters_forward<Half, By::taps>, filters_data<Half, By::taps>, nullptr},
    {filters_forward<float, By::taps, double>, filters_data<float, By::taps, double>, nullptr},
    filters_packed_floats<By::taps>, filters_pack<By::taps>, filters_forward_packed<By::taps>,
};
extern const Kernel ECE408_THIS_BUILD(filters_as_lanes_pairs) = {
    {filters_forward<float, By::pairs>, filters_data<float, By::pairs>, nullptr},
    {filters_forward<double, By::pairs>, filters_data<double, By::pairs>, nullptr},
    {filters_forward<Half, By::pairs>, filters_data<Half, By::pairs>, nullptr},
    {},
    filters_packed_floats<By::pairs>, filters_pack<By::pairs>, filters_forward_packed<By::pairs>,
};
extern const Kernel ECE408_THIS_BUILD(filters_as_lanes_squares) = {
    {filters_forward<float, By::squares>, filters_data<float, By::squares>, nullptr},
    {filters_forward<double, By::squares>, filters_data<double, By::squares>, nullptr},
    {filters_forward<Half, By::squares>, filters_data<Half, By::squares>, nullptr},
    {},
    filters_packed_floats<By::squares>, filters_pack<By::squares>, filters_forward_packed<By::squares>,
};
extern const Kernel ECE408_THIS_BUILD(patches) = {
    {patches_forward<float>, patches_data<float>, patches_weight<float>},
    {patches_forward<double>, patches_data<double>, patches_weight<double>},
    {patches_forward<Half>, patches_data<Half>, patches_weight<Half>},
    {patches_forward<float, double>, patches_data<float, double>, patches_weight<float, double>},
};
extern const Kernel ECE408_THIS_BUILD(channels_as_lanes) = {
    {nullptr, nullptr, channels_weight<float>},
    {nullptr, nullptr, channels_weight<double>},
    {nullptr, nullptr, channels_weight<Half>},
    {nullptr, nullptr, channels_weight<float, double>},
};

}  // namespace ece408
