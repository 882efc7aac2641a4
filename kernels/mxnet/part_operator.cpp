// The operator `ece408_part`: part of a graph as one node of MXNet's. Python makes a part when all
// types are known; the node names it by a number. For each set of shapes Python makes a program
// (kernels/cpu/network/program.h), which a call then computes without Python; or Python computes each
// call, on the GPU.
//
// MXNet may make a hybridized block's operators again for every call: parts outlive them.
#include <sstream>

#include "part.h"

namespace {

using ece408::Part;
using ece408::Program;
using mxnet::ext::OpResource;

// Never destroyed: MXNet's threads may still be running when the process ends.
struct Parts {
    std::mutex mutex;
    std::map<int, std::shared_ptr<Part>> all;
};

Parts& parts() {
    static auto* const all = new Parts;
    return *all;
}

std::shared_ptr<Part> part(int number) {
    const std::lock_guard<std::mutex> lock(parts().mutex);
    const auto found = parts().all.find(number);
    return found == parts().all.end() ? nullptr : found->second;
}

// The part of a node; null if this process did not make it, or has closed it.
std::shared_ptr<Part> part_of(const Attributes& attributes) {
    return part(std::atoi(value_of("part", attributes).c_str()));
}

// What the attributes say of a node's arrays: MXNet also asks when the part is closed, as for the
// backward pass of a call that was recorded before another graph came.
struct Counts {
    int inputs = 0, outputs = 0;
    std::vector<int> moving;  // the inputs that are moving averages

    bool read(const Attributes& attributes) {
        std::istringstream numbers(value_of("counts", attributes));
        if (!(numbers >> inputs >> outputs)) return false;
        for (int each = 0; numbers >> each;) moving.push_back(each);
        return true;
    }
};

MXReturnValue parse(const Attributes& attributes, int* inputs, int* outputs) {
    Counts counts;
    if (!counts.read(attributes)) return kRefused;
    *inputs = counts.inputs;
    *outputs = counts.outputs;
    return MX_SUCCESS;
}

MXReturnValue infer_part_types(const Attributes& attributes, std::vector<int>* in,
                               std::vector<int>* out) {
    const auto found = part_of(attributes);
    if (!found || in->size() != found->inputs()) return kRefused;
    for (size_t i = 0; i < in->size(); i++) {
        if ((*in)[i] != kUnknownType && (*in)[i] != found->type(i)) return kRefused;
        (*in)[i] = found->type(i);
    }
    for (size_t i = 0; i < out->size(); i++) (*out)[i] = found->type(in->size() + i);
    return MX_SUCCESS;
}

// By Python, for a thread that needs the answer.
std::shared_ptr<Program> asked(Part* part, const std::vector<Shape>& shapes) {
    if (shapes.size() != part->inputs()) return nullptr;
    ece408::Sizes sizes;
    for (size_t i = 0; i < shapes.size(); i++) {
        if (!are_sizes(shapes[i])) return nullptr;
        ece408::add(part->type(i), shapes[i], &sizes);
    }
    return part->program(sizes, false);
}

MXReturnValue infer_part_shapes(const Attributes& attributes, std::vector<Shape>* in,
                                std::vector<Shape>* out) {
    const auto found = part_of(attributes);
    const auto program = found ? asked(found.get(), *in) : nullptr;
    if (!program || program->outputs.size() != out->size()) return kRefused;
    *out = program->outputs;
    return MX_SUCCESS;
}

class Node : public mxnet::ext::CustomStatefulOp {
public:
    explicit Node(std::shared_ptr<Part> part) : part_(std::move(part)) {}

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const OpResource&) override {
        return part_->forward(*in, *out, &last_);
    }

    MXReturnValue Backward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                           const OpResource&) override {
        return part_->backward(*in, *out, last_);
    }

private:
    const std::shared_ptr<Part> part_;
    ece408::Recorded last_;
};

// Of the backward pass: its inputs are the gradients for the outputs, the inputs, and the outputs.
MXReturnValue parse_backward(const Attributes& attributes, int* inputs, int* outputs) {
    const MXReturnValue status = parse(attributes, outputs, inputs);
    *inputs = 2 * *inputs + *outputs;
    return status;
}

MXReturnValue infer_backward_types(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
    for (std::vector<int>* types : {in, out}) types->assign(types->size(), mxnet::ext::kFloat32);
    return MX_SUCCESS;
}

MXReturnValue infer_backward_shapes(const Attributes& attributes, std::vector<Shape>* in,
                                    std::vector<Shape>* out) {
    Counts counts;
    if (!counts.read(attributes)) return kRefused;
    const auto first = in->begin() + counts.outputs, last = first + counts.inputs;
    out->assign(first, last);
    std::copy(last, in->end(), in->begin());
    return MX_SUCCESS;
}

template <bool IS_BACKWARD>
MXReturnValue moving(const Attributes& attributes, std::vector<int>* inputs) {
    Counts counts;
    if (!counts.read(attributes)) return kRefused;
    *inputs = counts.moving;
    for (int& each : *inputs) each += IS_BACKWARD ? counts.outputs : 0;
    return MX_SUCCESS;
}

MXReturnValue refuse(const Attributes&, std::vector<MXTensor>*, std::vector<MXTensor>*,
                     const OpResource&) {
    return kRefused;
}

MXReturnValue create_node(const Attributes& attributes, const mxnet::ext::MXContext&,
                          const std::vector<Shape>& shapes, const std::vector<int>,
                          mxnet::ext::CustomStatefulOp** made) {
    const auto found = part_of(attributes);
    if (!found || !asked(found.get(), shapes)) return kRefused;
    *made = mxnet::ext::CustomStatefulOp::create<Node>(found);
    return MX_SUCCESS;
}

REGISTER_OP(ece408_part)
    .setParseAttrs(parse)
    .setInferType(infer_part_types)
    .setInferShape(infer_part_shapes)
    .setMutateInputs(moving<false>)
    .setCreateOpState(create_node, "cpu");

// MXNet asks a library's operator for the inputs that only its forward pass writes, but the averages
// move in the backward pass, as MXNet's own do. It registers that pass as an operator of its own; a
// second registration changes the first, and as it is for GPUs, the CPU's stays: Backward, above.
REGISTER_OP(_backward_ece408_part)
    .setParseAttrs(parse_backward)
    .setInferType(infer_backward_types)
    .setInferShape(infer_backward_shapes)
    .setMutateInputs(moving<true>)
    .setForward(refuse, "gpu");

}  // namespace

// In the place of lib_api's (setup.py), which allocates the numbers each time. MXNet asks whenever it lists a
// graph's inputs, copies the numbers at once, and never frees them.
int _opCallMutateInputs(mxnet::ext::mutateInputs_t mutate, const char* const* keys,
                        const char* const* values, int count, int** numbers, int* size) {
    thread_local std::vector<int> found;
    Attributes attributes;
    for (int i = 0; i < count; i++) attributes[keys[i]] = values[i];
    const MXReturnValue status = mutate(attributes, &found);
    *numbers = found.data();
    *size = static_cast<int>(found.size());
    return status;
}

void ece408_part_use(const ece408_part_functions* functions, const ece408_mxnet* of_mxnet) {
    ece408::part_functions = *functions;
    ece408::of_mxnet = *of_mxnet;
}

void ece408_part_open(int number, const char* kinds, const int* types, int arrays, int in_python) {
    const auto made = std::make_shared<Part>(
        number, kinds, std::vector<int>(types, types + arrays), in_python != 0);
    const std::lock_guard<std::mutex> lock(parts().mutex);
    parts().all[number] = made;
}

void ece408_part_train(int number, const int* inputs, const int* uses, int count) {
    if (const auto found = part(number)) found->train(inputs, uses, count);
}

void ece408_part_predict(int predicts) { ece408::predicts = predicts != 0; }

void ece408_part_forget(int number, const char* kinds) {
    if (const auto found = part(number)) found->forget(kinds);
}

void ece408_part_release(int number) {
    std::shared_ptr<Part> last;  // destroyed without the lock, which Python may wait for
    const std::lock_guard<std::mutex> lock(parts().mutex);
    last.swap(parts().all[number]);
    parts().all.erase(number);
}

int ece408_part_take(ece408_program* program, const ece408_code* made) {
    return program->part->take(*made, program) ? 1 : 0;
}

int ece408_part_call(int number, void* const* inputs, void** results, int64_t most_bytes,
                     uint64_t* version) {
    const auto found = part(number);
    return found ? found->call(inputs, results, most_bytes, version) : 0;
}

void ece408_memory_is_shared(void) { ece408::Versions::are_shared = true; }
