// The operator `ece408_pool`: max and average pooling of float32 arrays (images, channels, height,
// width), with the windows and borders of MXNet's Pooling, and its gradient. On arrays in plain
// layout, as this package's convolutions write them, MXNet's own takes up to thirty times as long
// as on oneDNN's blocked layouts.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "library.h"
#include "plans.h"

namespace {

// Floats of a thread's row; MXNet's own operator pools wider arrays.
constexpr int64_t kMostReach = 1 << 24;

struct Axis {
    int64_t kernel = 1, stride = 1, pad = 0;
};

// One axis of one array: its pixels and windows.
struct Windows : ece408_windows {
    // At least one window, and none in the border only, whose value would be undefined.
    bool all_meet() const { return count > 0 && (count - 1) * stride - pad < size; }
    // The end of the last window, border included.
    int64_t reach() const { return std::max((count - 1) * stride + kernel, size + 2 * pad); }
    // Its length, with or without the border.
    int64_t length(int64_t i, bool counts_border) const {
        const int64_t first = i * stride - pad, end = first + kernel;
        return counts_border ? std::min(end, size + pad) - first
                             : std::min(end, size) - std::max(first, int64_t{0});
    }
};

struct Pool {
    bool is_max = false, is_full = false, is_global = false, counts_border = false;
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
        is_max = flags[0], is_full = flags[1], is_global = flags[2], counts_border = flags[3];
        rows.kernel = n[0], columns.kernel = n[1];
        rows.stride = n[2], columns.stride = n[3];
        rows.pad = n[4], columns.pad = n[5];
        return *std::min_element(n, n + 4) > 0 && std::min(n[4], n[5]) >= 0 &&
               *std::max_element(n, n + 6) <= INT32_MAX;
    }

    Windows windows(const Axis& axis, int64_t size) const {
        if (is_global) return {{size, 1, size, 1, 0}};
        const int64_t spare = size + 2 * axis.pad - axis.kernel;
        const int64_t rest = is_full ? axis.stride - 1 : 0;
        const int64_t count = spare < 0 ? 0 : (spare + rest) / axis.stride + 1;
        return {{size, count, axis.kernel, axis.stride, axis.pad}};
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
        return true;
    }
};

class Pooling : public OfNode<Pool> {
public:
    using OfNode::OfNode;

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        const Planes planes = planes_of((*in)[0]);
        const auto plan = ece408::plans().plan({});
        return result_of(ece408::plans().others().pool(
            &planes.rows, &planes.columns, planes.heights(), planes.widths(), planes.count,
            (*in)[0].data<float>(), (*out)[0].data<float>(), plan->threads, plan->isa));
    }

    // From the gradient for y, x and y.
    MXReturnValue Backward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                           const mxnet::ext::OpResource&) override {
        const Planes planes = planes_of((*in)[1]);
        const auto plan = ece408::plans().plan({});
        return result_of(ece408::plans().others().pool_backward(
            &planes.rows, &planes.columns, planes.heights(), planes.widths(), planes.count,
            (*in)[1].data<float>(), (*in)[2].data<float>(), (*in)[0].data<float>(),
            (*out)[0].data<float>(), plan->threads, plan->isa));
    }

private:
    // An array as planes, all alike, and the lengths of windows on them, for averages.
    struct Planes {
        int64_t count;
        Windows rows, columns;
        std::vector<float> down, across;

        const float* heights() const { return down.empty() ? nullptr : down.data(); }
        const float* widths() const { return across.empty() ? nullptr : across.data(); }
    };

    Planes planes_of(const MXTensor& x) const {
        const Windows rows = node_.windows(node_.rows, x.shape[2]);
        const Windows columns = node_.windows(node_.columns, x.shape[3]);
        return {x.shape[0] * x.shape[1], rows, columns, lengths_of(rows), lengths_of(columns)};
    }

    std::vector<float> lengths_of(const Windows& windows) const {
        std::vector<float> lengths(node_.is_max ? 0 : windows.count);
        for (size_t i = 0; i < lengths.size(); i++)
            lengths[i] = static_cast<float>(windows.length(i, node_.counts_border));
        return lengths;
    }

    static MXReturnValue result_of(int status) {
        return status == ECE408_OK ? MX_SUCCESS : kRefused;
    }
};

REGISTER_OP(ece408_pool)
    .setParseAttrs(parse_attributes<Pool>)
    .setInferType(infer_types<Pool>)
    .setInferShape(infer_shapes<Pool>)
    .setCreateOpState(create<Pooling>, "cpu");

}  // namespace
