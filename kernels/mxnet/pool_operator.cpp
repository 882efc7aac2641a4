// The operator `ece408_pool`: max and average pooling of float32 arrays (images, channels, height,
// width), with the windows and borders of MXNet's Pooling, and its gradient. On arrays in plain
// layout, as this package's convolutions write them, MXNet's own takes up to thirty times as long
// as on oneDNN's blocked layouts.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../cpu/host/pages.h"
#include "library.h"
#include "plans.h"

// The compiler also makes these functions for vectors of 8 numbers, and the loader chooses. AVX2
// without FMA does not fuse products and sums: results are the same.
#if defined(__x86_64__)
#define ECE408_WIDER __attribute__((target_clones("avx2", "default")))
#else
#define ECE408_WIDER
#endif

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
    // The part of a window inside the array.
    int64_t begin(int64_t i) const { return std::max(i * stride - pad, int64_t{0}); }
    int64_t end(int64_t i) const { return std::min(i * stride - pad + kernel, size); }
    // The windows whose element n is inside the array.
    int64_t first_with(int64_t n) const { return n < pad ? (pad - n + stride - 1) / stride : 0; }
    int64_t last_with(int64_t n) const {
        return std::clamp((size + pad - n + stride - 1) / stride, int64_t{0}, count);
    }
    // The end of the last window, border included.
    int64_t reach() const { return std::max((count - 1) * stride + kernel, size + 2 * pad); }
    // Its length, with or without the border.
    int64_t length(int64_t i, bool counts_border) const {
        const int64_t first = i * stride - pad;
        return counts_border ? std::min(first + kernel, size + pad) - first : end(i) - begin(i);
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

// One element of each of `count` windows, at x, `STRIDE` apart. If it equals the window's largest,
// y, it takes the window's gradient, which moves from `left` to dx, whose elements are `TO` apart.
template <int64_t STRIDE, int64_t TO>
ECE408_WIDER void give_largest(const float* __restrict x, const float* __restrict y, int64_t stride,
                               int64_t count, float* __restrict left, float* __restrict dx) {
    const int64_t from = STRIDE ? STRIDE : stride, to = TO ? TO : stride;
    for (int64_t j = 0; j < count; j++) {
        const uint32_t takes = x[j * from] == y[j] ? ~uint32_t{0} : 0;
        const auto gradient = with_bits_of<uint32_t>(left[j]);
        dx[j * to] += with_bits_of<float>(gradient & takes);
        left[j] = with_bits_of<float>(gradient & ~takes);
    }
}

// Adds rows of even and of odd elements to dx, from element `first` of both on.
ECE408_WIDER void add_by_twos(const float* __restrict even, const float* __restrict odd,
                              int64_t first, int64_t count, float* __restrict dx) {
    if (first % 2 && count > 0) {
        *dx++ += odd[first / 2];
        first++, count--;
    }
    even += first / 2, odd += first / 2;
    const int64_t pairs = count / 2;
    for (int64_t j = 0; j < pairs; j++) {
        dx[2 * j] += even[j];
        dx[2 * j + 1] += odd[j];
    }
    if (count % 2 && count > 0) dx[count - 1] += even[pairs];
}

class Pooling : public OfNode<Pool> {
public:
    using OfNode::OfNode;

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        const Planes planes = planes_of((*in)[0]);
        const std::vector<float> heights = lengths_of(planes.rows), widths = lengths_of(planes.columns);
        const auto plan = ece408::plans().plan({});
        const int status = ece408::plans().others().pool(
            &planes.rows, &planes.columns, node_.is_max ? nullptr : heights.data(),
            node_.is_max ? nullptr : widths.data(), planes.count, (*in)[0].data<float>(),
            (*out)[0].data<float>(), plan->threads, plan->isa);
        return status == ECE408_OK ? MX_SUCCESS : kRefused;
    }

    // From the gradient for y, x and y.
    MXReturnValue Backward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                           const mxnet::ext::OpResource&) override {
        const Planes planes = planes_of((*in)[1]);
        const float *const dy = (*in)[0].data<float>(), *const x = (*in)[1].data<float>();
        const float* const y = (*in)[2].data<float>();
        float* const dx = (*out)[0].data<float>();
        const std::vector<float> widths = lengths_of(planes.columns);
        const auto one = [&](int64_t plane, float* row, float* to) {
            std::fill_n(to, planes.pixels(), 0.f);
            for (int64_t i = 0; i < planes.rows.count; i++) {
                const int64_t at = plane * planes.windows() + i * planes.columns.count;
                if (node_.is_max)
                    give_to_largest(planes, i, x + plane * planes.pixels(), y + at, dy + at, row, to);
                else
                    give_average(planes, i, widths.data(), dy + at, row, to);
            }
        };
        each_plane(planes, dx, planes.pixels(), one);
        return MX_SUCCESS;
    }

private:
    // An array as planes, all alike.
    struct Planes {
        int64_t count;
        Windows rows, columns;

        int64_t pixels() const { return rows.size * columns.size; }
        int64_t windows() const { return rows.count * columns.count; }
    };

    Planes planes_of(const MXTensor& x) const {
        return {x.shape[0] * x.shape[1], node_.windows(node_.rows, x.shape[2]),
                node_.windows(node_.columns, x.shape[3])};
    }

    std::vector<float> lengths_of(const Windows& windows) const {
        std::vector<float> lengths(windows.count);
        for (int64_t i = 0; i < windows.count; i++)
            lengths[i] = static_cast<float>(windows.length(i, node_.counts_border));
        return lengths;
    }

    // Calls work(plane, buffer, address in `to`) on the kernels' threads. A thread's buffer has
    // room for three rows with their borders.
    template <class Work>
    static void each_plane(const Planes& planes, float* to, int64_t size, const Work& work) {
        ask_for_huge_pages(to, planes.count * size * int64_t{4});
        const int threads = ece408::plans().threads();
        ece408::plans().parallel_for(threads, planes.count, [&](int64_t begin, int64_t end) {
            std::vector<float> buffer(3 * planes.columns.reach() + 2);
            for (int64_t plane = begin; plane < end; plane++)
                work(plane, buffer.data(), to + plane * size);
        });
    }

    // A row of windows adds its gradient to the plane `dx`.
    static void give_to_largest(const Planes& planes, int64_t i, const float* x, const float* y,
                                const float* dy, float* buffer, float* dx) {
        const Windows& columns = planes.columns;
        const int64_t width = columns.size, first = planes.rows.begin(i);
        std::copy_n(dy, columns.count, buffer);
        for (int64_t r = first; r < planes.rows.end(i); r++)
            give_terms(columns, x + r * width, y, buffer, dx + r * width);
        // If no element equals y, because all are NaN or -inf, the first one takes it.
        for (int64_t j = 0; j < columns.count; j++)
            if (buffer[j] != 0) dx[first * width + columns.begin(j)] += buffer[j];
    }

    // Distributes the windows' gradients, the first `count` floats of the buffer, to one row of
    // elements: first to the first element of every window, then to the second one, and so on. With
    // stride 2, even and odd elements are in separate rows, so that the compiler vectorises.
    static void give_terms(const Windows& columns, const float* x, const float* y, float* buffer,
                           float* dx) {
        const int64_t stride = columns.stride, half = (columns.reach() + 1) / 2;
        const auto give = stride == 1   ? give_largest<1, 1>
                          : stride == 2 ? give_largest<2, 1>
                                        : give_largest<0, 0>;
        float* const halves = buffer + columns.count;
        if (stride == 2) std::fill_n(halves, 2 * half, 0.f);
        for (int64_t n = 0; n < columns.kernel; n++) {
            const int64_t begin = columns.first_with(n), end = columns.last_with(n);
            const int64_t at = begin * stride + n - columns.pad;
            float* const to = stride == 2 ? halves + n % 2 * half + n / 2 + begin : dx + at;
            if (begin < end) give(x + at, y + begin, stride, end - begin, buffer + begin, to);
        }
        if (stride == 2) add_by_twos(halves, halves + half, columns.pad, columns.size, dx);
    }

    void give_average(const Planes& planes, int64_t i, const float* widths, const float* dy,
                      float* row, float* dx) const {
        const Windows& columns = planes.columns;
        const auto height = static_cast<float>(planes.rows.length(i, node_.counts_border));
        std::fill_n(row, columns.reach(), 0.f);
        for (int64_t j = 0; j < columns.count; j++) {
            const float share = dy[j] / (height * widths[j]);
            for (int64_t n = 0; n < columns.kernel; n++) row[j * columns.stride + n] += share;
        }
        for (int64_t r = planes.rows.begin(i); r < planes.rows.end(i); r++)
            for (int64_t c = 0; c < columns.size; c++)
                dx[r * columns.size + c] += row[columns.pad + c];
    }
};

REGISTER_OP(ece408_pool)
    .setParseAttrs(parse_attributes<Pool>)
    .setInferType(infer_types<Pool>)
    .setInferShape(infer_shapes<Pool>)
    .setCreateOpState(create<Pooling>, "cpu");

}  // namespace
