// The operator `ece408_part`: part of a graph as one node of MXNet's. Python makes a part when all
// types are known; the node names it by a number. For each set of shapes Python makes a program
// (kernels/cpu/network/program.h), which a call then computes without Python.
//
// MXNet may make a hybridized block's operators again for every call: parts outlive them.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "../cpu/host/buffer.h"
#include "callbacks.h"
#include "library.h"
#include "plans.h"
#include "python_calls.h"
#include "versions.h"

namespace {

using mxnet::ext::OpResource;

// Programs of one part that are kept.
constexpr size_t kMostPrograms = 8;
constexpr size_t kLine = 64;

ece408_part_functions python{};

// The types and shapes of arrays: for each array its type, its number of dimensions, and these.
using Sizes = std::vector<int64_t>;

template <typename Sizes_>
void append(int type, const Sizes_& shape, Sizes* sizes) {
    sizes->push_back(type);
    sizes->push_back(static_cast<int64_t>(shape.size()));
    sizes->insert(sizes->end(), shape.begin(), shape.end());
}

}  // namespace

// What Python makes for one set of shapes.
struct ece408_program {
    Sizes sizes;  // of the inputs
    std::vector<Shape> outputs;
    std::vector<ece408_step> for_weights, for_images;
    int64_t arena_bytes = 0;
    int isa = 0;
    ece408::Buffer<char> lasting;
    uint64_t generation = 0;  // of the settings
    uint64_t version = 0;     // of the weights that are in `lasting`
    int64_t number = 0;       // Python's

    ece408_program() = default;
    ece408_program(const ece408_program&) = delete;
    ~ece408_program() {
        if (number != 0) ece408::run_python([this] { return python.forget(number); });
    }
};

namespace {

using Program = ece408_program;

// The array of `bytes` of MXNet's temporary memory, which lasts for the call, or else in `own`.
char* temporary(const OpResource& resource, int64_t bytes, ece408::Buffer<char>* own) {
    if (bytes + static_cast<int64_t>(kLine) > INT32_MAX) {
        *own = ece408::Buffer<char>(bytes);
        return *own;
    }
    try {
        const auto given = reinterpret_cast<uintptr_t>(
            resource.alloc_cpu(static_cast<int>(bytes) + static_cast<int>(kLine)));
        return reinterpret_cast<char*>((given + kLine - 1) / kLine * kLine);
    } catch (...) {
        return nullptr;
    }
}

class Part {
public:
    Part(int number, const std::string& kinds, std::vector<int> types)
        : number_(number), types_(std::move(types)), inputs_(kinds.size()), versions_(kinds) {}

    Part(const Part&) = delete;
    ~Part() {
        forget();
        ece408::run_python([this] { return python.close(number_); });
    }

    size_t inputs() const { return inputs_; }
    size_t outputs() const { return types_.size() - inputs_; }
    int type(size_t array) const { return types_[array]; }

    // Other arrays come, and no call is in progress.
    void forget(const std::string& kinds) { versions_.forget(kinds); }

    // The program for inputs of these shapes; null if Python refuses. `ask` calls Python, with
    // whether a call waits for it.
    template <typename Ask>
    std::shared_ptr<Program> program(const Sizes& sizes, const Ask& ask) {
        const uint64_t generation = ece408::plans().generation();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (auto each = programs_.begin(); each != programs_.end(); ++each) {
                if ((*each)->generation != generation || (*each)->sizes != sizes) continue;
                programs_.splice(programs_.begin(), programs_, each);
                return programs_.front();
            }
        }
        const auto made = std::make_shared<Program>();
        made->sizes = sizes;
        made->generation = generation;
        const int is_made = ask([&](int is_call) {
            const auto count = static_cast<int64_t>(sizes.size());
            return python.make(number_, sizes.data(), count, made.get(), is_call);
        });
        if (!is_made) return nullptr;
        std::list<std::shared_ptr<Program>> old;  // destroyed without the lock
        const std::lock_guard<std::mutex> lock(mutex_);
        programs_.push_front(made);
        for (auto each = programs_.begin(); each != programs_.end();) {
            const auto next = std::next(each);
            if ((*each)->generation != generation) old.splice(old.end(), programs_, each);
            each = next;
        }
        if (programs_.size() > kMostPrograms)
            old.splice(old.end(), programs_, std::prev(programs_.end()));
        return made;
    }

    MXReturnValue compute(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const OpResource& resource) {
        Sizes sizes;
        sizes.reserve(6 * in->size());
        for (const MXTensor& array : *in) append(array.dtype, array.shape, &sizes);
        const auto made = program(sizes, [](const auto& make) {
            return ece408::run_python([&] { return make(1); });
        });
        if (!made) return kRefused;
        ece408::Buffer<char> own;
        std::vector<void*> bases{temporary(resource, made->arena_bytes, &own), made->lasting};
        for (const std::vector<MXTensor>* arrays : {in, out})
            for (const MXTensor& array : *arrays) bases.push_back(array.data_ptr);
        if (!bases[0]) return kRefused;
        const uint64_t version = versions_.of(*in);
        std::shared_lock<std::shared_mutex> reading(lasting_);
        if (made->version == version) return run(*made, made->for_images, bases);
        // It stays locked for the call: another one may bring other weights.
        reading.unlock();
        const std::lock_guard<std::shared_mutex> writing(lasting_);
        if (made->version != version) {
            made->version = 0;
            const MXReturnValue status = run(*made, made->for_weights, bases);
            if (status != MX_SUCCESS) return status;
            made->version = version;
        }
        return run(*made, made->for_images, bases);
    }

private:
    void forget() {
        std::list<std::shared_ptr<Program>> old;
        const std::lock_guard<std::mutex> lock(mutex_);
        old.swap(programs_);
    }

    static MXReturnValue run(const Program& program, const std::vector<ece408_step>& steps,
                             const std::vector<void*>& bases) {
        ece408::Plans& plans = ece408::plans();
        const bool is_timed = plans.logs() && &steps == &program.for_images;
        std::vector<double> seconds(is_timed ? steps.size() : 0);
        int64_t failed = 0;
        const auto count = static_cast<int64_t>(steps.size());
        const int status =
            plans.others().run(steps.data(), count, bases.data(), plans.threads(), program.isa,
                               is_timed ? seconds.data() : nullptr, &failed);
        if (status == ECE408_OK && !is_timed) return MX_SUCCESS;
        const int is_done = ece408::run_python([&] {
            return python.report(program.number, seconds.data(), is_timed ? count : 0, status, failed,
                                 steps.empty() ? -1 : steps[failed].kind);
        });
        return status == ECE408_OK && is_done ? MX_SUCCESS : kRefused;
    }

    const int number_;
    const std::vector<int> types_;  // of the inputs and outputs, by MXNet's numbers
    const size_t inputs_;
    ece408::Versions versions_;
    std::shared_mutex lasting_;  // protects what programs keep of weights
    std::mutex mutex_;           // protects `programs_`, the last used first
    std::list<std::shared_ptr<Program>> programs_;
};

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
    const auto found = attributes.find("part");
    if (!made_here(attributes) || found == attributes.end()) return nullptr;
    return part(std::atoi(found->second.c_str()));
}

MXReturnValue parse(const Attributes& attributes, int* inputs, int* outputs) {
    const auto found = part_of(attributes);
    if (!found) return kRefused;
    *inputs = static_cast<int>(found->inputs());
    *outputs = static_cast<int>(found->outputs());
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
    Sizes sizes;
    for (size_t i = 0; i < shapes.size(); i++) {
        if (!are_sizes(shapes[i])) return nullptr;
        append(part->type(i), shapes[i], &sizes);
    }
    return part->program(sizes, [](const auto& make) {
        return ece408::ask_python([&] { return make(0); });
    });
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
                          const OpResource& resource) override {
        return part_->compute(in, out, resource);
    }

    // Graphs with such a node never run with gradients.
    MXReturnValue Backward(std::vector<MXTensor>*, std::vector<MXTensor>*,
                           const OpResource&) override {
        return kRefused;
    }

private:
    const std::shared_ptr<Part> part_;
};

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
    .setCreateOpState(create_node, "cpu");

}  // namespace

void ece408_part_use(const ece408_part_functions* functions) { python = *functions; }

void ece408_part_open(int number, const char* kinds, const int* types, int arrays) {
    const auto made = std::make_shared<Part>(number, kinds, std::vector<int>(types, types + arrays));
    const std::lock_guard<std::mutex> lock(parts().mutex);
    parts().all[number] = made;
}

void ece408_part_forget(int number, const char* kinds) {
    if (const auto found = part(number)) found->forget(kinds);
}

void ece408_part_release(int number) {
    std::shared_ptr<Part> last;  // destroyed without the lock, which Python may wait for
    const std::lock_guard<std::mutex> lock(parts().mutex);
    last.swap(parts().all[number]);
    parts().all.erase(number);
}

void ece408_part_output(ece408_program* program, const int64_t* shape, int dimensions) {
    program->outputs.emplace_back(shape, shape + dimensions);
}

int ece408_part_give(ece408_program* program, int64_t number, const ece408_step* for_weights,
                     const ece408_step* for_images, int64_t weight_steps, int64_t image_steps,
                     int64_t arena_bytes, int64_t lasting_bytes, int isa) {
    program->number = number;
    program->for_weights.assign(for_weights, for_weights + weight_steps);
    program->for_images.assign(for_images, for_images + image_steps);
    program->arena_bytes = arena_bytes;
    program->lasting = ece408::Buffer<char>(lasting_bytes);
    program->isa = isa;
    return program->lasting ? 1 : 0;
}
