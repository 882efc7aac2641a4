// The operator `ece408_pool`: the largest value or the average of windows of arrays (images,
// channels, height, width) in float32, with the windows and borders of MXNet's Pooling. On arrays
// in plain layout, as convolutions of this package leave them, MXNet's own takes up to thirty times
// what it takes on oneDNN's blocked ones.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "../cpu/pages.h"
#include "library.h"
#include "plans.h"

namespace {

// Floats in the row that every thread has; MXNet's own operator pools wider arrays.
constexpr int64_t kMostReach = 1 << 24;

struct Axis {
    int64_t kernel = 1, stride = 1, pad = 0;
};

// One axis of one array: its pixels and windows.
struct Windows : Axis {
    int64_t size, count;

    // There are windows, and none is all border, of which there is nothing to say.
    bool all_meet() const { return count > 0 && (count - 1) * stride - pad < size; }
    // Where a window begins and ends, the part of it that is on the array.
    int64_t begin(int64_t i) const { return std::max(i * stride - pad, int64_t{0}); }
    int64_t end(int64_t i) const { return std::min(i * stride - pad + kernel, size); }
    // What the last window reaches, border included.
    int64_t reach() const { return std::max((count - 1) * stride + kernel, size + 2 * pad); }
    // Its length, as far as the border, which counts or not.
    int64_t length(int64_t i, bool counts_border) const {
        const int64_t first = i * stride - pad;
        return counts_border ? std::min(first + kernel, size + pad) - first : end(i) - begin(i);
    }
};

struct Pool {
    bool is_max = false, is_full = false, is_global = false, counts_border = false;
    bool is_flat = false;  // as in an epilogue
    Axis rows, columns;

    size_t inputs() const { return 1; }
    bool only_float32() const { return true; }

    bool read(const Attributes& attributes) {
        const auto window = attributes.find("window");
        if (window == attributes.end()) return false;
        long long n[6];
        int flags[4];
        if (std::sscanf(window->second.c_str(), "%d %d %d %d %lld %lld %lld %lld %lld %lld",
                        &flags[0], &flags[1], &flags[2], &flags[3], &n[0], &n[1], &n[2], &n[3],
                        &n[4], &n[5]) != 10)
            return false;
        is_flat = ::is_flat(attributes);
        is_max = flags[0], is_full = flags[1], is_global = flags[2], counts_border = flags[3];
        rows.kernel = n[0], columns.kernel = n[1];
        rows.stride = n[2], columns.stride = n[3];
        rows.pad = n[4], columns.pad = n[5];
        return *std::min_element(n, n + 4) > 0 && std::min(n[4], n[5]) >= 0 &&
               *std::max_element(n, n + 6) <= INT32_MAX;
    }

    Windows windows(const Axis& axis, int64_t size) const {
        if (is_global) return {{size, 1, 0}, size, 1};
        const int64_t spare = size + 2 * axis.pad - axis.kernel;
        const int64_t rest = is_full ? axis.stride - 1 : 0;
        return {axis, size, spare < 0 ? 0 : (spare + rest) / axis.stride + 1};
    }

    bool infer(std::vector<Shape>* in, Shape* out) const {
        const Shape& x = (*in)[0];
        if (x.size() != 4) return false;
        const Windows down = windows(rows, x[2]), across = windows(columns, x[3]);
        if (!down.all_meet() || !across.all_meet()) return false;
        if (!is_size(down.count) || !is_size(across.count) || across.reach() > kMostReach)
            return false;
        *out = {x[0], x[1], static_cast<unsigned int>(down.count),
                static_cast<unsigned int>(across.count)};
        return !is_flat || flatten(out);
    }
};

struct Largest {
    static constexpr float kNone = std::numeric_limits<float>::lowest();
    static float of(float a, float b) { return a < b ? b : a; }
};

struct Sum {
    static constexpr float kNone = 0;
    static float of(float a, float b) { return a + b; }
};

// y of N terms each, `step` apart, or y and one more. With strides that the compiler knows it takes
// vectors.
template <class Reduction, int N, int64_t STRIDE>
void reduce_terms(const float* __restrict x, int64_t step, int64_t stride, int64_t count,
                  float* __restrict y) {
    const int64_t from = STRIDE ? STRIDE : stride;
    for (int64_t i = 0; i < count; i++) {
        float value = N == 1 ? Reduction::of(y[i], x[i * from]) : x[i * from];
        for (int n = 1; n < N; n++) value = Reduction::of(value, x[n * step + i * from]);
        y[i] = value;
    }
}

// y, each element of `terms` terms.
template <class Reduction, int64_t STRIDE>
void reduce(const float* x, int64_t terms, int64_t step, int64_t stride, int64_t count, float* y) {
    int64_t done = 0;
    if (terms >= 3) {
        reduce_terms<Reduction, 3, STRIDE>(x, step, stride, count, y);
        done = 3;
    } else if (terms == 2) {
        reduce_terms<Reduction, 2, STRIDE>(x, step, stride, count, y);
        done = 2;
    } else {
        std::fill(y, y + count, Reduction::kNone);
    }
    for (; done < terms; done++)
        reduce_terms<Reduction, 1, STRIDE>(x + done * step, step, stride, count, y);
}

// A row of windows from the rows that they have in common, one after the other in `x`: first these
// into one, in `buffer` with its borders, then its columns.
template <class Reduction>
void reduce_row(const Windows& columns, const float* x, int64_t rows, float* buffer, float* y) {
    const int64_t terms = columns.kernel, stride = columns.stride, count = columns.count;
    reduce<Reduction, 1>(x, rows, columns.size, 1, columns.size, buffer + columns.pad);
    if (stride == 1)
        reduce<Reduction, 1>(buffer, terms, 1, 1, count, y);
    else if (stride == 2)
        reduce<Reduction, 2>(buffer, terms, 1, 2, count, y);
    else
        reduce<Reduction, 0>(buffer, terms, 1, stride, count, y);
}

class Pooling : public mxnet::ext::CustomStatefulOp {
public:
    using Node = Pool;

    Pooling(const Pool& pool, const std::vector<Shape>&, const std::vector<int>&,
            const mxnet::ext::MXContext&)
        : pool_(pool) {}

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        if (pool_.is_max)
            pool<Largest>((*in)[0], &(*out)[0]);
        else
            pool<Sum>((*in)[0], &(*out)[0]);
        return MX_SUCCESS;
    }

private:
    template <class Reduction>
    void pool(const MXTensor& in, MXTensor* out) const {
        const std::vector<int64_t>& shape = in.shape;
        const Windows rows = pool_.windows(pool_.rows, shape[2]);
        const Windows columns = pool_.windows(pool_.columns, shape[3]);
        const float* const x = static_cast<const float*>(in.data_ptr);
        float* const y = out->data<float>();
        ask_for_huge_pages(y, shape[0] * shape[1] * rows.count * columns.count * int64_t{4});
        const int threads = ece408::plans().threads();
        std::vector<float> widths(columns.count);
        for (int64_t j = 0; j < columns.count; j++)
            widths[j] = static_cast<float>(columns.length(j, pool_.counts_border));
        ece408::plans().share(threads, shape[0] * shape[1], [&](int64_t begin, int64_t end) {
            std::vector<float> buffer(columns.reach(), Reduction::kNone);
            for (int64_t plane = begin; plane < end; plane++)
                for (int64_t i = 0; i < rows.count; i++) {
                    const int64_t first = rows.begin(i), count = rows.end(i) - first;
                    float* const to = y + (plane * rows.count + i) * columns.count;
                    reduce_row<Reduction>(columns, x + (plane * shape[2] + first) * shape[3],
                                          count, buffer.data(), to);
                    if (pool_.is_max) continue;
                    const auto height = static_cast<float>(rows.length(i, pool_.counts_border));
                    for (int64_t j = 0; j < columns.count; j++) to[j] /= height * widths[j];
                }
        });
    }

    Pool pool_;
};

REGISTER_OP(ece408_pool)
    .setParseAttrs(parse_attributes<Pool>)
    .setInferType(infer_types<Pool>)
    .setInferShape(infer_shapes<Pool>)
    .setCreateOpState(create<Pooling>, "cpu");

}  // namespace
