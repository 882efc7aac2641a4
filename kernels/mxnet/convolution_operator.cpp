// The operator `ece408_convolution` of MXNet's library interface: `ece408_conv` on the CPU, with
// its gradients, and forward on MXNet's GPU arrays, without Python. MXNet runs it on its own
// thread, on arrays in plain layout.
//
// MXNet does not tell a library's operator whether a gradient is wanted, or whether it is added to
// the array's contents. So a node's attribute lists the gradients to compute, and a graph that adds
// a gradient does not get this operator.
//
// Python chooses the kernel once for each layer, shape and type; the choice is valid until the
// settings change. If Python chooses no compiled kernel, it computes the call itself. On a GPU it
// returns launches, which are enqueued on MXNet's stream.
#include <sstream>

#include "../cpu/api/shape.h"
#include "library.h"

namespace {

using ece408::Plan;
using ece408::plans;
using ece408::Times;
using mxnet::ext::OpResource;

// The attributes: the layer as Python describes it, and its convolution without the data's sizes.
struct Layer {
    std::string description;
    int64_t spatial = 2, bias = 0;
    bool for_data = true, for_weight = true;  // the wanted gradients; the bias's with w's
    ece408_problem problem{};  // batch, channels, height and width are the data's

    size_t inputs() const { return static_cast<size_t>(2 + bias); }

    // False for attributes that this process did not write.
    bool read(const Attributes& attributes);
};

bool Layer::read(const Attributes& attributes) {
    description = value_of("layer", attributes);
    std::istringstream numbers(description);
    ece408_problem& p = problem;
    for (int64_t* each : {&spatial, &bias, &p.filters, &p.groups, &p.kernel_h, &p.kernel_w,
                          &p.stride_h, &p.stride_w, &p.pad_h, &p.pad_w, &p.dilate_h, &p.dilate_w})
        if (!(numbers >> *each)) return false;
    if ((spatial != 1 && spatial != 2) || (bias != 0 && bias != 1)) return false;
    const auto gradients = attributes.find("gradients");
    if (gradients != attributes.end()) {
        for_data = gradients->second.find("data") != std::string::npos;
        for_weight = gradients->second.find("weight") != std::string::npos;
    }
    return true;
}

// The layer's convolution of this data. One-dimensional data is images of height 1.
template <typename Sizes>
bool set_data(const Layer& layer, const Sizes& x, ece408_problem* problem) {
    if (x.size() != static_cast<size_t>(2 + layer.spatial)) return false;
    *problem = layer.problem;
    problem->batch = x[0], problem->channels = x[1];
    problem->height = layer.spatial == 1 ? 1 : x[2];
    problem->width = x[x.size() - 1];
    return true;
}

// Two spatial sizes, or the second of them for one-dimensional arrays.
Shape shape_of(const Layer& layer, int64_t first, int64_t second, int64_t height, int64_t width) {
    Shape shape{static_cast<unsigned int>(first), static_cast<unsigned int>(second)};
    if (layer.spatial == 2) shape.push_back(static_cast<unsigned int>(height));
    shape.push_back(static_cast<unsigned int>(width));
    return shape;
}

class Convolution : public mxnet::ext::CustomStatefulOp {
public:
    // Python chooses the kernel here already: on a GPU it prepares what the first call would wait
    // for.
    Convolution(const Layer& layer, const std::vector<Shape>& shapes, const std::vector<int>& types,
                const mxnet::ext::MXContext& context)
        : layer_(layer), gpu_(context.dev_type == "gpu" ? context.dev_id : ECE408_ON_CPU) {
        ece408_problem first;
        if (set_data(layer, shapes[0], &first)) plans().plan(call_of(first, types[0], ECE408_FORWARD));
    }

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const OpResource& resource) override {
        const MXTensor &x = (*in)[0], &w = (*in)[1];
        void* const bias = layer_.bias ? (*in)[2].data_ptr : nullptr;
        const Arrays arrays{x.data_ptr, w.data_ptr, bias, (*out)[0].data_ptr};
        return compute(x, ECE408_FORWARD, arrays, resource);
    }

    // From the gradient for y, the inputs and y: the gradients for data, weight[, bias].
    MXReturnValue Backward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                           const OpResource& resource) override {
        const MXTensor &dy = (*in)[0], &x = (*in)[1], &w = (*in)[2];
        void* const dbias = layer_.bias ? (*out)[2].data_ptr : nullptr;
        const Arrays for_data{w.data_ptr, dy.data_ptr, (*out)[0].data_ptr, nullptr};
        const Arrays for_weight{x.data_ptr, dy.data_ptr, (*out)[1].data_ptr, dbias};
        MXReturnValue status = MX_SUCCESS;
        if (layer_.for_data) status = compute(x, ECE408_BACKWARD_DATA, for_data, resource);
        if (layer_.for_weight && status == MX_SUCCESS)
            status = compute(x, ECE408_BACKWARD_WEIGHT, for_weight, resource);
        return status;
    }

private:
    // The argument of `ece408_compute`.
    using Arrays = std::array<void*, 4>;

    // For this object's lifetime.
    ece408_call call_of(const ece408_problem& p, int type, int direction) const {
        const char* const layer = layer_.description.c_str();
        return {layer, direction, gpu_, type, {p.batch, p.channels, p.height, p.width}};
    }

    MXReturnValue compute(const MXTensor& x, int direction, const Arrays& arrays,
                          const OpResource& resource) const {
        ece408_problem p;
        if (!set_data(layer_, x.shape, &p)) return kRefused;
        const ece408_call call = call_of(p, x.dtype, direction);
        const auto plan = plans().plan(call);
        Times times;
        const bool is_done = gpu_ == ECE408_ON_CPU ? run_on_cpu(p, direction, *plan, arrays, &times)
                                                   : run_on_gpu(*plan, arrays, resource, &times);
        // Python also computes after a kernel's failure, to report the reason.
        return success_if(is_done ? plans().report(call, *plan, times)
                                  : plans().compute(call, arrays.data()));
    }

    static bool run_on_cpu(const ece408_problem& p, int direction, const Plan& plan,
                           const Arrays& arrays, Times* times) {
        if (!plan.function) return false;
        const auto start = ece408::Clock::now();
        const int status = run(p, direction, plan, arrays);
        times->all = ece408::seconds_since(start);
        return status == ECE408_OK;
    }

    // Unless op times are collected it returns after enqueuing, without times.
    static bool run_on_gpu(const Plan& plan, const Arrays& arrays, const OpResource& resource,
                           Times* times) {
        void* const stream = resource.get_cuda_stream();
        void* const workspace = memory(resource, plan.workspace_bytes);
        void* const all[] = {arrays[0], arrays[1], arrays[2], arrays[3], workspace};
        static_assert(std::size(all) == ECE408_WORKSPACE + 1, "the workspace is the last");
        const bool has_memory = workspace || plan.workspace_bytes == 0;
        if (!plan.launches.empty() && has_memory &&
            (plans().logs ? run_timed(plan.launches, all, stream, times)
                          : enqueue(plan.launches, all, stream)))
            return true;
        // Python computes on its own stream, and meets this stream's failures itself.
        ece408::wait_for(stream);
        return false;
    }

    // GPU memory until the operator's end, in stream order. Without memory MXNet throws; then
    // Python computes, and reports the error.
    static void* memory(const OpResource& resource, int bytes) {
        if (bytes == 0) return nullptr;
        try {
            return resource.alloc_gpu(bytes);
        } catch (...) {
            return nullptr;
        }
    }

    static int run(const ece408_problem& p, int direction, const Plan& plan, const Arrays& a) {
        if (direction == ECE408_FORWARD)
            return reinterpret_cast<ece408_function*>(plan.function)(
                &p, a[0], a[1], a[2], a[3], 0, plan.threads, plan.isa, plan.kernel);
        const int status = reinterpret_cast<ece408_gradient*>(plan.function)(
            &p, a[0], a[1], a[2], 0, plan.threads, plan.isa, plan.kernel);
        if (status != ECE408_OK || direction == ECE408_BACKWARD_DATA || !a[3]) return status;
        return plan.bias_gradient(&p, a[1], a[3], 0, plan.threads);
    }

    Layer layer_;
    int gpu_;
};

MXReturnValue parse(const Attributes& attributes, int* inputs, int* outputs) {
    Layer layer;
    if (!layer.read(attributes)) return kRefused;
    *inputs = static_cast<int>(layer.inputs());
    *outputs = 1;
    return MX_SUCCESS;
}

// All arrays have one type.
MXReturnValue infer_types(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
    int common = kUnknownType;
    for (int type : *in) {
        if (type == kUnknownType) continue;
        if (type > mxnet::ext::kFloat16 || (common != kUnknownType && type != common)) return kRefused;
        common = type;
    }
    in->assign(in->size(), common);
    (*out)[0] = common;
    return MX_SUCCESS;
}

MXReturnValue infer_shapes(const Attributes& attributes, std::vector<Shape>* in,
                           std::vector<Shape>* out) {
    Layer layer;
    ece408_problem p;
    if (!layer.read(attributes) || in->size() != layer.inputs() || !are_sizes((*in)[0]) ||
        !set_data(layer, (*in)[0], &p) || !ece408::valid(p))
        return kRefused;
    const ece408::Shape s = ece408::derive(p);
    if (!is_size(s.out_height) || !is_size(s.out_width)) return kRefused;
    (*in)[1] = shape_of(layer, s.filters, s.group_channels, s.kernel_h, s.kernel_w);
    if (layer.bias) (*in)[2] = {static_cast<unsigned int>(s.filters)};
    (*out)[0] = shape_of(layer, s.batch, s.filters, s.out_height, s.out_width);
    return MX_SUCCESS;
}

// MXNet has compared the shapes and types with those above.
MXReturnValue create(const Attributes& attributes, const mxnet::ext::MXContext& context,
                     const std::vector<Shape>& shapes, const std::vector<int> types,
                     mxnet::ext::CustomStatefulOp** made) {
    Layer layer;
    if (!layer.read(attributes)) return kRefused;
    *made = mxnet::ext::CustomStatefulOp::create<Convolution>(layer, shapes, types, context);
    return MX_SUCCESS;
}

REGISTER_OP(ece408_convolution)
    .setParseAttrs(parse)
    .setInferType(infer_types)
    .setInferShape(infer_shapes)
    .setCreateOpState(create, "cpu")
    .setCreateOpState(create, "gpu");

}  // namespace

mxnet::ext::MXReturnValue initialize(int) { return MX_SUCCESS; }

void ece408_forward_use(const ece408_forward_functions* functions, const char* key) {
    plans().use(*functions, key);
}

void ece408_forward_forget(void) { plans().forget(); }

void ece408_forward_launch(ece408_plan* plan, const ece408_launch* launch) {
    static_cast<Plan*>(plan)->launches.emplace_back(*launch);
}

void ece408_forward_drive(const ece408_driver* driver) { ece408::driver = *driver; }

void ece408_forward_log(int is_open) { plans().logs = is_open != 0; }
