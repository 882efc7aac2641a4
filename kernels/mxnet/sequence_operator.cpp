// The operator `ece408_sequence`: several nodes of this library's operators as one node of MXNet's.
// The nodes run in order, and their intermediate arrays are in one workspace. MXNet takes some
// microseconds for each node of a library, beside the node's own work.
//
// The attribute "counts" has the numbers of inputs and outputs, which MXNet requests several times
// in each call. "nodes" is a list of words, each with its length in bytes, ":" and its text: the
// number of nodes; for each node its operator, its attributes (number; keys and values) and its
// inputs (number; indices); and the outputs' indices. Indices count the inputs first and then the
// nodes, each of which has one output.
//
// The attribute "holds" has an owner, and the indices of inputs that are parameters: a call lets
// the owner hold copies of them (held.h). A sequence that also has "held" gets the other inputs
// only, and an extra array that it does not read: a wait for that array waits for every call of the
// sequence.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/host/buffer.h"
#include "held.h"
#include "operators.h"
#include "sequence.h"

namespace {

using ece408::CustomOp;
using ece408::CustomStatefulOp;
using mxnet::ext::MXContext;
using mxnet::ext::OpResource;

class Words {
public:
    explicit Words(const std::string& text) : text_(text) {}

    std::string word() {
        const size_t colon = text_.find(':', at_);
        if (colon == std::string::npos) return fail();
        const size_t length = std::strtoull(text_.c_str() + at_, nullptr, 10);
        if (length > text_.size() - colon - 1) return fail();
        at_ = colon + 1 + length;
        return text_.substr(colon + 1, length);
    }

    // At most `most`.
    size_t number(size_t most) {
        const size_t number = std::strtoull(word().c_str(), nullptr, 10);
        if (number > most) fail();
        return is_read_ ? number : 0;
    }

    // A number of words that follow.
    size_t count() { return number(text_.size()); }

    std::vector<size_t> numbers(size_t count, size_t most) {
        std::vector<size_t> found(count);
        for (size_t& each : found) each = number(most);
        return found;
    }

    bool is_read() const { return is_read_ && at_ == text_.size(); }

private:
    std::string fail() {
        is_read_ = false;
        at_ = text_.size();
        return {};
    }

    const std::string& text_;
    size_t at_ = 0;
    bool is_read_ = true;
};

struct Member {
    const CustomOp* op = nullptr;
    Attributes attributes;
    std::vector<size_t> takes;

    // Whether it concatenates and does nothing else.
    bool is_concat() const {
        return std::strcmp(op->name, "ece408_concat") == 0 && !attributes.count("normalize") &&
               !attributes.count("bounds");
    }
};

struct Sequence {
    size_t inputs = 0;
    std::vector<Member> members;
    std::vector<size_t> gives;
    std::string owner;
    std::vector<size_t> holds;  // ascending
    bool is_held = false;

    bool read_counts(const Attributes& attributes);
    bool read(const Attributes& attributes);
    bool read_held(const Attributes& attributes);

    // The number of arrays that MXNet passes.
    size_t given() const { return is_held ? inputs - holds.size() + 1 : inputs; }

    bool holds_array(size_t array) const {
        return std::binary_search(holds.begin(), holds.end(), array);
    }

    // The inputs that it reads from MXNet's arrays.
    std::vector<size_t> reads() const {
        std::vector<size_t> found;
        for (size_t i = 0; i < inputs; i++)
            if (!is_held || !holds_array(i)) found.push_back(i);
        return found;
    }

    // The shapes of all inputs, from those that MXNet passes.
    std::vector<Shape> of_inputs(const std::vector<Shape>& given) const {
        std::vector<Shape> all(inputs);
        size_t next = 0;
        for (size_t each : reads()) all[each] = given[next++];
        return all;
    }

    bool is_given(size_t array) const {
        return std::find(gives.begin(), gives.end(), array) != gives.end();
    }

    // The shapes of all arrays; completes those of the inputs.
    bool infer(std::vector<Shape>* shapes) const;
};

bool Sequence::read_counts(const Attributes& attributes) {
    const auto counts = attributes.find("counts");
    unsigned int in = 0, out = 0;
    if (counts == attributes.end() || !made_here(attributes) ||
        std::sscanf(counts->second.c_str(), "%u %u", &in, &out) != 2)
        return false;
    inputs = in;
    gives.resize(out);
    return read_held(attributes);
}

bool Sequence::read_held(const Attributes& attributes) {
    const auto text = attributes.find("holds");
    if (text == attributes.end()) return true;
    std::istringstream words(text->second);
    words >> owner;
    for (size_t number; words >> number;) holds.push_back(number);
    is_held = attributes.count("held") != 0;
    if (is_held) inputs += holds.size() - 1;
    return std::is_sorted(holds.begin(), holds.end()) && !holds.empty() && holds.back() < inputs;
}

bool Sequence::read(const Attributes& attributes) {
    const auto nodes = attributes.find("nodes");
    if (nodes == attributes.end() || !read_counts(attributes)) return false;
    Words words(nodes->second);
    members.resize(words.count());
    size_t known = inputs;
    for (Member& member : members) {
        member.op = ece408::operator_named(words.word());
        for (size_t left = words.count(); left > 0; left--) {
            const std::string key = words.word();
            member.attributes[key] = words.word();
        }
        if (!member.op || known == 0) return false;
        member.takes = words.numbers(words.count(), known++ - 1);
    }
    if (members.empty()) return false;
    gives = words.numbers(gives.size(), known - 1);
    return words.is_read() &&
           std::all_of(gives.begin(), gives.end(), [&](size_t each) { return each >= inputs; });
}

bool Sequence::infer(std::vector<Shape>* shapes) const {
    shapes->resize(inputs);
    for (const Member& member : members) {
        std::vector<Shape> in, out(1);
        for (size_t each : member.takes) in.push_back((*shapes)[each]);
        if (in.empty() || member.op->infer_shape(member.attributes, &in, &out) != MX_SUCCESS)
            return false;
        for (size_t i = 0; i < in.size(); i++) {
            Shape& known = (*shapes)[member.takes[i]];
            if (!known.empty() && are_sizes(known) && known != in[i]) return false;
            known = in[i];
        }
        shapes->push_back(out[0]);
    }
    return true;
}

// Offsets of the arrays that only the sequence itself uses. For one image, inputs of a
// concatenation are placed in its output from the start, so that nothing is copied.
class Workspace {
public:
    // `array` itself, or the array that contains it, and the offset.
    struct Place {
        size_t whole = 0, offset = 0;
    };

    size_t bytes() const { return bytes_; }
    const Place& place(size_t array) const { return places_[array]; }
    size_t offset(size_t whole) const { return spans_[whole].begin; }

    void lay_out(const Sequence& sequence, const std::vector<Shape>& shapes) {
        places_.resize(shapes.size());
        for (size_t i = 0; i < shapes.size(); i++) places_[i] = {i, 0};
        for (size_t m = sequence.members.size(); m-- > 0;)
            if (sequence.members[m].is_concat()) join(sequence, m, shapes);
        spans_.assign(shapes.size(), {});
        bytes_ = 0;
        for (size_t m = 0; m < sequence.members.size(); m++) {
            spans_[places_[sequence.inputs + m].whole].last = m;
            for (size_t each : sequence.members[m].takes) spans_[places_[each].whole].last = m;
        }
        for (size_t m = 0; m < sequence.members.size(); m++) {
            const size_t whole = places_[sequence.inputs + m].whole;
            if (spans_[whole].end == 0 && !sequence.is_given(whole))
                put(m, bytes_of(shapes[whole]), &spans_[whole]);
        }
    }

    // Alignment of arrays.
    static constexpr size_t kLine = 64;

private:
    // `last`: of the nodes that use it.
    struct Span {
        size_t begin = 0, end = 0, last = 0;
    };

    static size_t bytes_of(const Shape& shape) {
        size_t bytes = sizeof(float);
        for (unsigned int size : shape) bytes *= size;
        return bytes;
    }

    // Places the inputs of concatenation m in its output, unless they are already placed. Later
    // nodes have been joined.
    void join(const Sequence& sequence, size_t m, const std::vector<Shape>& shapes) {
        const size_t array = sequence.inputs + m;
        if (shapes[array][0] != 1) return;
        Place next = places_[array];
        for (size_t each : sequence.members[m].takes) {
            const bool is_free = places_[each].whole == each && each >= sequence.inputs;
            if (is_free && !sequence.is_given(each)) places_[each] = next;
            next.offset += bytes_of(shapes[each]);
        }
    }

    // The lowest free offset while node m computes.
    void put(size_t m, size_t bytes, Span* own) {
        std::vector<Span> taken;
        for (const Span& each : spans_)
            if (each.end > 0 && each.last >= m) taken.push_back(each);
        std::sort(taken.begin(), taken.end(),
                  [](const Span& a, const Span& b) { return a.begin < b.begin; });
        size_t begin = 0;
        const size_t lines = (bytes + kLine - 1) / kLine * kLine;
        for (const Span& each : taken) {
            if (begin + lines <= each.begin) break;
            begin = std::max(begin, each.end);
        }
        own->begin = begin, own->end = begin + lines;
        bytes_ = std::max(bytes_, own->end);
    }

    std::vector<Place> places_;
    std::vector<Span> spans_;  // of arrays that no other array contains
    size_t bytes_ = 0;
};

class Run : public ece408::SequenceOperator {
public:
    Run(const Sequence& sequence, const MXContext& context)
        : sequence_(sequence), context_(context), reads_(sequence.reads()),
          sources_(sequence.inputs), held_(ece408::held().find(sequence.owner)) {}

    // Makes the nodes' operators, for inputs of these shapes.
    bool start(const std::vector<Shape>& given) {
        const std::vector<Shape> inputs = sequence_.of_inputs(given);
        std::vector<Shape> all = inputs;
        if (!sequence_.infer(&all)) return false;
        for (const Member& member : sequence_.members) {
            std::vector<Shape> in;
            for (size_t each : member.takes) in.push_back(all[each]);
            steps_.push_back({ece408::make_operator(*member.op, member.attributes, context_, in), {}, {}});
            if (!steps_.back().op) return false;
        }
        return lay_out(inputs);
    }

    MXReturnValue Forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out,
                          const OpResource& resource) override {
        if (!fits(*in)) {
            std::vector<Shape> shapes;
            for (size_t i = 0; i < reads_.size(); i++)
                shapes.emplace_back((*in)[i].shape.begin(), (*in)[i].shape.end());
            if (!lay_out(sequence_.of_inputs(shapes))) return kRefused;
        }
        if (sequence_.is_held && !find_held()) return kRefused;
        for (size_t i = 0; i < reads_.size(); i++)
            sources_[reads_[i]] = {(*in)[i].data_ptr, (*in)[i].verID};
        ece408::Buffer<char> own;
        char* const memory = workspace(resource, &own);
        if (!memory) return kRefused;
        const ece408::Plans::Settled settled(&ece408::plans());
        for (size_t m = 0; m < steps_.size(); m++) {
            Step& step = steps_[m];
            const std::vector<size_t>& takes = sequence_.members[m].takes;
            for (size_t i = 0; i < takes.size(); i++) {
                step.in[i].data_ptr = address(takes[i], *out, memory);
                if (takes[i] < sequence_.inputs) step.in[i].verID = sources_[takes[i]].writes;
            }
            step.out[0].data_ptr = address(sequence_.inputs + m, *out, memory);
            if (step.op->Forward(&step.in, &step.out, resource) != MX_SUCCESS) return kRefused;
        }
        if (held_ && !sequence_.is_held) hold(*in);
        return MX_SUCCESS;
    }

    size_t workspace_bytes() const override { return workspace_.bytes() + Workspace::kLine; }

private:
    // A node's operator, and its inputs and output.
    struct Step {
        std::unique_ptr<CustomStatefulOp> op;
        std::vector<MXTensor> in, out;
    };

    // The address of an input, and its count of writes.
    struct Source {
        void* data = nullptr;
        size_t writes = 0;
    };

    // The held inputs; false if there are none.
    bool find_held() {
        const auto now = held_ ? held_->arrays() : nullptr;
        for (size_t place = 0; now && now != arrays_ && place < sequence_.holds.size(); place++)
            sources_[sequence_.holds[place]] = {now->content(place), now->version()};
        arrays_ = now;
        return now != nullptr;
    }

    void hold(const std::vector<MXTensor>& in) {
        std::vector<ece408::HeldArray> arrays;
        for (size_t each : sequence_.holds) {
            const auto content = static_cast<const char*>(in[each].data_ptr);
            const auto bytes = static_cast<size_t>(in[each].size()) * sizeof(float);
            arrays.push_back({in[each].verID, {content, content + bytes}});
        }
        held_->hold(std::make_shared<ece408::HeldArrays>(std::move(arrays)));
    }

    // From these inputs' shapes to all others; false if they do not fit.
    bool lay_out(std::vector<Shape> shapes) {
        if (!sequence_.infer(&shapes)) return false;
        const auto tensor = [&](size_t array) { return ece408::tensor(shapes[array], context_); };
        shapes_.clear();
        for (size_t each : reads_) shapes_.push_back(shapes[each]);
        workspace_.lay_out(sequence_, shapes);
        for (size_t m = 0; m < steps_.size(); m++) {
            steps_[m].in.clear();
            for (size_t each : sequence_.members[m].takes) steps_[m].in.push_back(tensor(each));
            steps_[m].out.assign(1, tensor(sequence_.inputs + m));
        }
        return true;
    }

    bool fits(const std::vector<MXTensor>& in) const {
        const auto same = [](const Shape& a, const MXTensor& b) {
            return std::equal(a.begin(), a.end(), b.shape.begin(), b.shape.end());
        };
        return std::equal(shapes_.begin(), shapes_.end(), in.begin(), in.begin() + reads_.size(), same);
    }

    // MXNet's memory, which it keeps for later calls; at most 2 GiB. The nodes must not request
    // any: that would move this workspace.
    char* workspace(const OpResource& resource, ece408::Buffer<char>* own) const {
        const size_t bytes = workspace_bytes();
        if (bytes > INT32_MAX) {
            *own = ece408::Buffer<char>(bytes);
            return *own;
        }
        try {
            const auto given = reinterpret_cast<uintptr_t>(resource.alloc_cpu(static_cast<int>(bytes)));
            return reinterpret_cast<char*>((given + Workspace::kLine - 1) / Workspace::kLine *
                                           Workspace::kLine);
        } catch (...) {
            return nullptr;
        }
    }

    void* address(size_t array, const std::vector<MXTensor>& out, char* memory) const {
        if (array < sequence_.inputs) return sources_[array].data;
        const Workspace::Place& place = workspace_.place(array);
        const auto& gives = sequence_.gives;
        const auto found = std::find(gives.begin(), gives.end(), place.whole);
        char* const whole = found == gives.end()
                                ? memory + workspace_.offset(place.whole)
                                : static_cast<char*>(out[found - gives.begin()].data_ptr);
        return whole + place.offset;
    }

    Sequence sequence_;
    MXContext context_;
    std::vector<Step> steps_;
    std::vector<size_t> reads_;  // as the sequence's
    std::vector<Shape> shapes_;  // of these
    std::vector<Source> sources_;  // of all inputs
    Workspace workspace_;
    std::shared_ptr<ece408::Held> held_;
    std::shared_ptr<ece408::HeldArrays> arrays_;
};

MXReturnValue parse_sequence(const Attributes& attributes, int* inputs, int* outputs) {
    Sequence sequence;
    if (!sequence.read_counts(attributes)) return kRefused;
    *inputs = static_cast<int>(sequence.given());
    *outputs = static_cast<int>(sequence.gives.size());
    return MX_SUCCESS;
}

// All are of float32.
MXReturnValue infer_sequence_types(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
    for (int type : *in)
        if (type != kUnknownType && type != mxnet::ext::kFloat32) return kRefused;
    in->assign(in->size(), mxnet::ext::kFloat32);
    out->assign(out->size(), mxnet::ext::kFloat32);
    return MX_SUCCESS;
}

MXReturnValue infer_sequence_shapes(const Attributes& attributes, std::vector<Shape>* in,
                                    std::vector<Shape>* out) {
    Sequence sequence;
    if (!sequence.read(attributes) || sequence.given() != in->size()) return kRefused;
    std::vector<Shape> all = sequence.of_inputs(*in);
    if (!sequence.infer(&all)) return kRefused;
    size_t next = 0;
    for (size_t each : sequence.reads()) (*in)[next++] = all[each];
    for (size_t i = 0; i < sequence.gives.size(); i++) (*out)[i] = all[sequence.gives[i]];
    return MX_SUCCESS;
}

MXReturnValue create_sequence(const Attributes& attributes, const MXContext& context,
                              const std::vector<Shape>& shapes, const std::vector<int> types,
                              CustomStatefulOp** made) {
    Sequence sequence;
    const bool is_float32 = std::all_of(types.begin(), types.end(),
                                        [](int type) { return type == mxnet::ext::kFloat32; });
    if (!sequence.read(attributes) || sequence.given() != shapes.size() || !is_float32)
        return kRefused;
    std::unique_ptr<CustomStatefulOp> run(CustomStatefulOp::create<Run>(sequence, context));
    if (!static_cast<Run*>(run.get())->start(shapes)) return kRefused;
    *made = run.release();
    return MX_SUCCESS;
}

REGISTER_OP(ece408_sequence)
    .setParseAttrs(parse_sequence)
    .setInferType(infer_sequence_types)
    .setInferShape(infer_sequence_shapes)
    .setCreateOpState(create_sequence, "cpu");

}  // namespace

// Never destroyed: MXNet's threads may still be running when the process ends.
ece408::Owners<ece408::Held>& ece408::held() {
    static auto* const all = new Owners<Held>;
    return *all;
}

void ece408_held_own(const char* owner) {
    ece408::held().own(owner, std::make_shared<ece408::Held>());
}

void ece408_held_forget(const char* owner) {
    if (const auto held = ece408::held().find(owner)) held->forget();
}

void ece408_held_release(const char* owner) { ece408::held().release(owner); }

int ece408_held_are_current(const char* owner, void* const* handles,
                            const ece408_mxnet* functions) {
    const auto held = ece408::held().find(owner);
    const auto arrays = held ? held->arrays() : nullptr;
    int status = 0;
    const bool are_current = arrays && arrays->are_current(handles, *functions, &status);
    return status != 0 ? -1 : are_current ? 1 : 0;
}

int ece408_are_foreign(void* const* handles, int count) {
    return std::any_of(handles, handles + count, ece408::is_foreign) ? 1 : 0;
}

uint64_t ece408_held_writes(const void* handle) { return ece408::writes_to(handle); }
