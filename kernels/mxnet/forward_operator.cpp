// The operator `ece408_forward` of MXNet's library interface: the forward pass of `ece408_conv`
// on the CPU without Python in its way. MXNet runs it on its own thread, on arrays in plain layout.
//
// What computes a call is asked of Python once for each layer, shape and type, and remembered
// until the settings change; a call without an answer that is a kernel is handed to Python whole.
#include <mxnet/lib_api.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "../cpu/shape.h"
#include "forward_operator.h"

namespace {

using Attributes = std::unordered_map<std::string, std::string>;
using Shape = std::vector<unsigned int>;
using mxnet::ext::MX_FAIL;
using mxnet::ext::MX_SUCCESS;
using mxnet::ext::MXReturnValue;
using mxnet::ext::MXTensor;

// What the attributes say: the layer's number with Python, and the convolution but for its data.
struct Layer {
    int64_t site = -1;
    int spatial = 2, bias = 0;
    ece408_problem problem{};  // batch, channels, height and width are the data's
};

bool parse(const Attributes& attributes, Layer* layer) {
    const auto site = attributes.find("site"), geometry = attributes.find("geometry");
    if (site == attributes.end() || geometry == attributes.end()) return false;
    layer->site = std::strtoll(site->second.c_str(), nullptr, 10);
    long long n[12];
    const int read = std::sscanf(
        geometry->second.c_str(), "%lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld %lld",
        &n[0], &n[1], &n[2], &n[3], &n[4], &n[5], &n[6], &n[7], &n[8], &n[9], &n[10], &n[11]);
    if (read != 12) return false;
    layer->spatial = static_cast<int>(n[0]);
    layer->bias = static_cast<int>(n[1]);
    ece408_problem& p = layer->problem;
    p.filters = n[2], p.groups = n[3];
    p.kernel_h = n[4], p.kernel_w = n[5], p.stride_h = n[6], p.stride_w = n[7];
    p.pad_h = n[8], p.pad_w = n[9], p.dilate_h = n[10], p.dilate_w = n[11];
    return true;
}

// A one-dimensional convolution is a two-dimensional one on images of height 1.
template <typename Sizes>
bool set_data(const Sizes& x, Layer* layer) {
    if (x.size() != static_cast<size_t>(2 + layer->spatial)) return false;
    ece408_problem& p = layer->problem;
    p.batch = x[0], p.channels = x[1];
    p.height = layer->spatial == 1 ? 1 : x[2];
    p.width = x[x.size() - 1];
    return true;
}

// Two spatial sizes, or the second of them for one-dimensional arrays.
Shape shape_of(const Layer& layer, int64_t first, int64_t second, int64_t height, int64_t width) {
    Shape shape{static_cast<unsigned int>(first), static_cast<unsigned int>(second)};
    if (layer.spatial == 2) shape.push_back(static_cast<unsigned int>(height));
    shape.push_back(static_cast<unsigned int>(width));
    return shape;
}

MXReturnValue fail(const char* what) {
    MX_ERROR_MSG << what;
    return MX_FAIL;
}

MXReturnValue parse_attributes(const Attributes& attributes, int* inputs, int* outputs) {
    Layer layer;
    if (!parse(attributes, &layer)) return fail("ece408_forward: attributes cannot be read");
    *inputs = 2 + layer.bias;
    *outputs = 1;
    return MX_SUCCESS;
}

// MXNet's number for a type that is not known yet; float32, float64 and float16 are 0 to 2.
constexpr int kUnknownType = -1;

MXReturnValue infer_types(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
    int common = kUnknownType;
    for (int type : *in) {
        if (type == kUnknownType) continue;
        if (type > mxnet::ext::kFloat16) return fail("ece408_forward: the type is not supported");
        if (common != kUnknownType && type != common)
            return fail("ece408_forward: the inputs are of different types");
        common = type;
    }
    in->assign(in->size(), common);
    (*out)[0] = common;
    return MX_SUCCESS;
}

MXReturnValue infer_shapes(const Attributes& attributes, std::vector<Shape>* in,
                           std::vector<Shape>* out) {
    Layer layer;
    if (!parse(attributes, &layer) || !set_data((*in)[0], &layer) ||
        !ece408::valid(layer.problem))
        return fail("ece408_forward: there is no such convolution of data");
    const ece408::Shape s = ece408::derive(layer.problem);
    (*in)[1] = shape_of(layer, s.filters, s.group_channels, s.kernel_h, s.kernel_w);
    if (layer.bias) (*in)[2] = {static_cast<unsigned int>(s.filters)};
    (*out)[0] = shape_of(layer, s.batch, s.filters, s.out_height, s.out_width);
    return MX_SUCCESS;
}

// Layer, type, batch, channels, height, width.
using Call = std::array<int64_t, 6>;

constexpr size_t kMostPlans = 4096;
// The settings that choose among CPU kernels; a change of any makes every plan void.
constexpr const char* kVariables[] = {"ECE408_BACKEND", "ECE408_ISA", "ECE408_THREADS"};

class Plans {
public:
    void use(ece408_ask* ask, ece408_compute* compute) {
        ask_ = ask;
        compute_ = compute;
    }

    void forget() {
        const std::lock_guard<std::mutex> lock(mutex_);
        plans_.clear();
        ++generation_;
    }

    ece408_plan plan(const Call& call) {
        uint64_t generation;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            watch_environment();
            const auto found = plans_.find(call);
            if (found != plans_.end()) return found->second;
            generation = generation_;
        }
        ece408_plan answer{};
        ask_(call[0], static_cast<int>(call[1]), call.data() + 2, &answer);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (plans_.size() >= kMostPlans) plans_.clear();
        if (generation == generation_) plans_[call] = answer;
        return answer;
    }

    bool compute(const Call& call, const void* x, const void* w, const void* bias, void* y) {
        return compute_(call[0], static_cast<int>(call[1]), call.data() + 2, x, w, bias, y) != 0;
    }

private:
    void watch_environment() {
        for (size_t i = 0; i < environment_.size(); i++) {
            const char* value = std::getenv(kVariables[i]);
            if (environment_[i] == (value ? value : "")) continue;
            environment_[i] = value ? value : "";
            plans_.clear();
            ++generation_;
        }
    }

    std::mutex mutex_;
    std::map<Call, ece408_plan> plans_;
    std::array<std::string, 3> environment_;
    uint64_t generation_ = 0;
    ece408_ask* ask_ = nullptr;
    ece408_compute* compute_ = nullptr;
};

// Never destroyed: MXNet's threads may still be running when the process ends.
Plans& plans() {
    static Plans* const all = new Plans;
    return *all;
}

class Convolution : public mxnet::ext::CustomStatefulOp {
public:
    explicit Convolution(const Layer& layer) : layer_(layer) {}

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const mxnet::ext::OpResource&) override {
        Layer layer = layer_;
        if (!set_data((*in)[0].shape, &layer)) return fail("ece408_forward: no convolution");
        const ece408_problem& p = layer.problem;
        const Call call{layer.site, (*in)[0].dtype, p.batch, p.channels, p.height, p.width};
        const void *x = (*in)[0].data_ptr, *w = (*in)[1].data_ptr;
        const void* bias = layer.bias ? (*in)[2].data_ptr : nullptr;
        void* y = (*out)[0].data_ptr;
        const ece408_plan plan = plans().plan(call);
        if (plan.kernel &&
            plan.kernel(&p, x, w, bias, y, 0, plan.threads, plan.isa) == ECE408_OK)
            return MX_SUCCESS;
        // Python also does what a kernel could not, so as to say why.
        if (plans().compute(call, x, w, bias, y)) return MX_SUCCESS;
        return fail("ece408_forward: see ece408_op.errors.surfaced for what went wrong");
    }

private:
    Layer layer_;
};

MXReturnValue create(const Attributes& attributes, const mxnet::ext::MXContext&,
                     const std::vector<Shape>&, const std::vector<int>,
                     mxnet::ext::CustomStatefulOp** made) {
    Layer layer;
    if (!parse(attributes, &layer)) return fail("ece408_forward: attributes cannot be read");
    *made = mxnet::ext::CustomStatefulOp::create<Convolution>(layer);
    return MX_SUCCESS;
}

REGISTER_OP(ece408_forward)
    .setParseAttrs(parse_attributes)
    .setInferType(infer_types)
    .setInferShape(infer_shapes)
    .setCreateOpState(create, "cpu");

}  // namespace

MXReturnValue initialize(int) { return MX_SUCCESS; }

void ece408_forward_use(ece408_ask* ask, ece408_compute* compute) { plans().use(ask, compute); }

void ece408_forward_forget(void) { plans().forget(); }
