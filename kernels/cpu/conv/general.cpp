// The kernels for any convolution, forward and backward, in two types, and once more for float
// with products and sums in double. Compiled once per instruction set, with ECE408_ISA its name and
// ECE408_LANES the floats of a vector; only the constants at the end are not local.
#include "api/kernels.h"
#include "conv/conv_bwd_w_ic.h"
#include "conv/conv_fwd_oc.h"
#include "conv/conv_fwd_ow.h"
#include "conv/im2col.h"

namespace ece408 {
namespace {

int status(bool done) { return done ? ECE408_OK : ECE408_NO_MEMORY; }

template <class T, class Sum = T>
int ow_forward(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
               bool accumulate, int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, w, y, forward_element<T>};
    const auto weight_at = [&](int64_t g, int64_t m, int64_t c, int64_t p, int64_t q) {
        return w[w_index(s, g * s.group_filters + m, c, p, q)];
    };
    return status(
        run_sweep<Sum>(forward_sweep(s), weight_at, book, x, bias, y, accumulate, threads));
}

template <class T, class Sum = T>
int ow_backward_data(const ece408_problem& problem, const T* w, const T* dy, T* dx, bool accumulate,
                     int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, w, dy, dx, data_element<T>};
    const T* const no_bias = nullptr;
    const auto weight_at = [&](int64_t g, int64_t c, int64_t m, int64_t p, int64_t q) {
        const int64_t row = s.kernel_h - 1 - p, column = s.kernel_w - 1 - q;
        return w[w_index(s, g * s.group_filters + m, c, row, column)];
    };
    return status(
        run_sweep<Sum>(backward_sweep(s), weight_at, book, dy, no_bias, dx, accumulate, threads));
}

// Flattens images if they are adjacent rows in memory, so that tiles divide them evenly.
Sweep forward_rows(const ece408_problem& p) {
    return forward_sweep(derive(p.stride_h == 1 && p.stride_w == 1 ? flattened(p) : p));
}

// Forms of conv_fwd_oc.h: direct, Winograd F(2,3) in one dimension, and in two.
enum class Method { direct, f23_1d, f23_2d };

template <Method METHOD>
bool describe(const ece408_problem& problem, OcConv* conv) {
    const Sweep sweep = forward_rows(problem);
    return METHOD == Method::direct ? describe_forward(sweep, conv)
                          : describe_winograd(sweep, false, METHOD == Method::f23_2d, conv);
}

// Weights of the forward pass.
template <class T>
OcWeights<T> forward_weights(const Shape& s, const T* w) {
    const int64_t window = s.kernel_h * s.kernel_w, filter = s.group_channels * window;
    return {w, s.group_filters * filter, filter, window};
}

// `packed`: weights packed by `oc_pack`, or null.
template <class T, Method METHOD, class Sum>
int oc_run(const ece408_problem& problem, const T* x, const T* w, const Sum* packed,
           const Epilogue<T>& epilogue, T* y, int threads) {
    const Shape s = derive(problem);
    OcConv conv;
    if (!describe<METHOD>(problem, &conv)) return ECE408_NO_MEMORY;
    OcPlan<T, Sum> plan(conv, forward_weights(s, w), {s, x, w, y, forward_element<T>});
    return status(run_oc(&plan, packed, x, epilogue, y, threads));
}

template <class T, Method METHOD, class Sum = T>
int oc_forward(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
               bool accumulate, int threads) {
    const Sum* const packed = nullptr;
    return oc_run<T, METHOD>(problem, x, w, packed, {bias, accumulate, {}}, y, threads);
}

template <Method METHOD>
int oc_forward_packed(const ece408_problem& problem, const float* x, const float* w,
                      const float* bias, const float* packed, const ece408_epilogue& epilogue,
                      float* y, int threads) {
    return oc_run<float, METHOD>(problem, x, w, packed, {bias, false, epilogue}, y, threads);
}

template <Method METHOD>
int64_t oc_packed_floats(const ece408_problem& problem) {
    OcConv conv;
    if (!describe<METHOD>(problem, &conv)) return 0;
    const OcPlan<float, float> plan(conv, {}, {});
    return plan.units() * plan.packed();
}

template <Method METHOD>
int oc_pack(const ece408_problem& problem, const float* w, const float*, float* packed,
            int threads) {
    const Shape s = derive(problem);
    OcConv conv;
    if (!describe<METHOD>(problem, &conv)) return ECE408_NO_MEMORY;
    const OcPlan<float, float> plan(conv, forward_weights(s, w), {});
    pack_oc(plan, packed, threads);
    return ECE408_OK;
}

template <class T, Method METHOD, class Sum = T>
int oc_backward_data(const ece408_problem& problem, const T* w, const T* dy, T* dx, bool accumulate,
                     int threads) {
    const Shape s = derive(problem);
    const int64_t window = s.kernel_h * s.kernel_w, filter = s.group_channels * window;
    const OcWeights<T> weights = {w, s.group_filters * filter, window, filter};
    const Sum* const no_packed = nullptr;
    OcConv conv;
    const bool ready =
        METHOD == Method::direct
            ? describe_backward_data(forward_rows(problem), &conv)
            : describe_winograd(backward_sweep(s), true, METHOD == Method::f23_2d, &conv);
    if (!ready) return ECE408_NO_MEMORY;
    OcPlan<T, Sum> plan(conv, weights, {s, w, dy, dx, data_element<T>});
    return status(run_oc(&plan, no_packed, dy, {nullptr, accumulate, {}}, dx, threads));
}

template <class T, class Sum = T>
int im2col_forward(const ece408_problem& problem, const T* x, const T* w, const T* bias, T* y,
                   bool accumulate, int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, w, y, forward_element<T>};
    return status(
        im2col_dots<Sum>(forward_sweep(s), book, x, w, bias, y, accumulate, threads));
}

template <class T, class Sum = T>
int im2col_backward_data(const ece408_problem& problem, const T* w, const T* dy, T* dx, bool accumulate,
                         int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, w, dy, dx, data_element<T>};
    return status(col2im<Sum>(forward_sweep(s), book, w, dy, dx, accumulate, threads));
}

template <class T, class Sum = T>
int im2col_backward_weight(const ece408_problem& problem, const T* x, const T* dy, T* dw, bool accumulate,
                           int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, dy, dw, weight_element<T>};
    return status(im2col_weights<Sum>(forward_sweep(s), book, x, dy, dw, accumulate, threads));
}

template <class T, class Sum = T>
int ic_backward_weight(const ece408_problem& problem, const T* x, const T* dy, T* dw, bool accumulate,
                       int threads) {
    const Shape s = derive(problem);
    const Textbook book = {s, x, dy, dw, weight_element<T>};
    return status(run_bwd_w_ic<Sum>(s, book, x, dy, dw, accumulate, threads));
}

}  // namespace

extern const Kernel ECE408_THIS_BUILD(conv_fwd_ow) = {
    {ow_forward<float>, ow_backward_data<float>, nullptr},
    {ow_forward<double>, ow_backward_data<double>, nullptr},
    {ow_forward<float, double>, ow_backward_data<float, double>, nullptr},
};
extern const Kernel ECE408_THIS_BUILD(conv_fwd_oc) = {
    {oc_forward<float, Method::direct>, oc_backward_data<float, Method::direct>, nullptr},
    {oc_forward<double, Method::direct>, oc_backward_data<double, Method::direct>, nullptr},
    {oc_forward<float, Method::direct, double>, oc_backward_data<float, Method::direct, double>, nullptr},
    oc_packed_floats<Method::direct>, oc_pack<Method::direct>, oc_forward_packed<Method::direct>,
};
extern const Kernel ECE408_THIS_BUILD(conv_fwd_oc_f23_1d) = {
    {oc_forward<float, Method::f23_1d>, oc_backward_data<float, Method::f23_1d>, nullptr},
    {oc_forward<double, Method::f23_1d>, oc_backward_data<double, Method::f23_1d>, nullptr},
    {},
    oc_packed_floats<Method::f23_1d>, oc_pack<Method::f23_1d>, oc_forward_packed<Method::f23_1d>,
};
extern const Kernel ECE408_THIS_BUILD(conv_fwd_oc_f23_2d) = {
    {oc_forward<float, Method::f23_2d>, oc_backward_data<float, Method::f23_2d>, nullptr},
    {oc_forward<double, Method::f23_2d>, oc_backward_data<double, Method::f23_2d>, nullptr},
    {},
    oc_packed_floats<Method::f23_2d>, oc_pack<Method::f23_2d>, oc_forward_packed<Method::f23_2d>,
};
extern const Kernel ECE408_THIS_BUILD(im2col) = {
    {im2col_forward<float>, im2col_backward_data<float>, im2col_backward_weight<float>},
    {im2col_forward<double>, im2col_backward_data<double>, im2col_backward_weight<double>},
    {im2col_forward<float, double>, im2col_backward_data<float, double>, im2col_backward_weight<float, double>},
};
extern const Kernel ECE408_THIS_BUILD(conv_bwd_w_ic) = {
    {nullptr, nullptr, ic_backward_weight<float>},
    {nullptr, nullptr, ic_backward_weight<double>},
    {nullptr, nullptr, ic_backward_weight<float, double>},
};

}  // namespace ece408
