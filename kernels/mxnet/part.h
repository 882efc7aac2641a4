// A part of a graph and its programs (kernels/cpu/network/program.h), which Python makes.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>
#include <shared_mutex>
#include <utility>

#include "../cpu/host/pages.h"
#include "array_handles.h"
#include "callbacks.h"
#include "library.h"
#include "plans.h"
#include "python_calls.h"
#include "versions.h"

namespace ece408 {

class Part;

using Memory = std::shared_ptr<char>;

// Bytes from a cache line on, for large arrays in huge pages; null if there is no room.
inline Memory memory_of(int64_t bytes) {
    constexpr size_t kLine = 64;
    const size_t lines = static_cast<size_t>(bytes) / kLine + 1;
    Memory made(static_cast<char*>(std::aligned_alloc(kLine, lines * kLine)), std::free);
    if (made) ask_for_huge_pages(made.get(), bytes);
    return made;
}

// Memory that is lent, and kept for the next loan when it comes back. It must outlive its loans.
class Lender {
public:
    // At least as many bytes, or null if there is no room.
    Memory lend(int64_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!memory_ || bytes_ < bytes) {
            memory_ = memory_of(bytes);
            bytes_ = bytes;
        }
        char* const begin = memory_.get();
        const auto give_back = [this, memory = std::move(memory_), bytes = bytes_](char*) {
            const std::lock_guard<std::mutex> lock(mutex_);
            memory_ = memory;
            bytes_ = bytes;
        };
        return {begin, give_back};
    }

private:
    std::mutex mutex_;
    Memory memory_;
    int64_t bytes_ = 0;
};

// Whether backward passes are of prediction.
inline std::atomic<bool> predicts{false};

// Python's functions.
inline ece408_part_functions part_functions{};

// What Python ends, by its number, with this object, unless that is 0.
struct OfPython {
    const ece408_ended what;
    int64_t number = 0;

    explicit OfPython(ece408_ended what, int64_t number = 0) : what(what), number(number) {}
    OfPython(const OfPython&) = delete;
    ~OfPython() {
        if (number != 0) run_python([this] { return part_functions.end(what, number); });
    }
};

struct Kept;

// Steps that Python has made, and what is kept that they read.
struct Code : OfPython {
    std::vector<ece408_step> steps;
    std::vector<std::shared_ptr<Kept>> kept;
    std::vector<int64_t> weights;  // as in `ece408_code`
    int64_t bytes = 0, forward_steps = 0;
    int isa = 0;

    Code() : OfPython(ECE408_CODE) {}
};

// What programs of a part keep of its weights.
struct Kept : Code {
    Memory memory;
    uint64_t version = 0;  // of the weights in it
    bool is_packed = false;  // all could be packed
};

}  // namespace ece408

// What Python makes for inputs of one set of shapes.
struct ece408_program : ece408::Code {
    ece408::Part* part = nullptr;
    ece408::Sizes sizes, data;  // of all inputs, and of data
    std::vector<Shape> outputs;
    int64_t saved_bytes = 0;  // of one with gradients
    uint64_t generation = 0;  // of the settings

    // Whether what it keeps is of this version, and, if asked, it reads no other weights.
    bool is_of(uint64_t version, bool is_packed = false) const {
        return std::all_of(kept.begin(), kept.end(), [&](const auto& each) {
            return each->version == version && (each->is_packed || !is_packed);
        });
    }
};

namespace ece408 {

using Program = ece408_program;

// A call of a part with gradients, from its forward pass on: what its backward passes read. It has a
// number if Python computes it.
struct Recorded : OfPython {
    std::shared_ptr<Program> program;
    Memory saved;

    Recorded() : OfPython(ECE408_RECORDED) {}
};

class Part : OfPython {
public:
    using Arrays = std::vector<MXTensor>;

    // `kinds` has the kind of each input; `types` are those of inputs and outputs.
    Part(int number, const std::string& kinds, std::vector<int> types, bool in_python)
        : OfPython(ECE408_PART, number),
          types_(std::move(types)),
          inputs_(kinds.size()),
          in_python_(in_python),
          versions_(kinds) {}

    size_t inputs() const { return inputs_; }
    size_t outputs() const { return types_.size() - inputs_; }
    int type(size_t array) const { return types_[array]; }

    // Gives it gradients, as `ece408_part_train`.
    void train(const int* inputs, const int* uses, int count) {
        has_gradients_ = true;
        for (int i = 0; i < count; i++) places_[uses[i]].push_back(static_cast<size_t>(inputs[i]));
    }

    // Other arrays come, and no call is in progress.
    void forget(const std::string& kinds) { versions_.forget(kinds); }

    // The program for inputs of these sizes; null if Python refuses. `is_call`: a call waits for it,
    // on a thread of MXNet's.
    std::shared_ptr<Program> program(const Sizes& sizes, bool is_call) {
        const uint64_t generation = this->generation();
        if (const auto known = find(&Program::sizes, sizes)) return known;
        // While Python makes one, nothing that is kept ends, since Python may use it.
        std::list<std::shared_ptr<Program>> old;
        const std::lock_guard<std::mutex> one_at_a_time(making_);
        const auto made = std::make_shared<Program>();
        made->part = this;
        made->sizes = sizes;
        made->generation = generation;
        auto begin = sizes.begin();
        for (size_t i = 0; i < inputs_; i++) {
            const auto end = begin + 2 + begin[1];
            if (versions_.is_data(i)) made->data.insert(made->data.end(), begin, end);
            begin = end;
        }
        const auto make = [&] {
            return part_functions.make(number, sizes.data(), static_cast<int64_t>(sizes.size()),
                                       made.get(), is_call);
        };
        if (!(is_call ? run_python(make) : ask_python(make))) return nullptr;
        const std::lock_guard<std::mutex> lock(mutex_);
        programs_.push_front(made);
        const auto is_valid = [&](const auto& each) { return each->generation == generation; };
        auto first = std::stable_partition(programs_.begin(), programs_.end(), is_valid);
        if (std::distance(programs_.begin(), first) > kMostPrograms) --first;
        old.splice(old.end(), programs_, first, programs_.end());
        return made;
    }

    // Takes what Python made for a program: packed weights that no program before it keeps, or the
    // program; false if there is no room, or something that it reads is not kept any more.
    bool take(const ece408_code& made, Program* program) {
        const auto kept = made.number > 0 ? std::make_shared<Kept>() : nullptr;
        Code& code = kept ? *kept : static_cast<Code&>(*program);
        code.number = made.number;
        code.steps.assign(made.steps, made.steps + made.step_count);
        code.weights.assign(made.weights, made.weights + made.weight_count);
        code.bytes = made.bytes;
        code.forward_steps = made.forward_steps;
        code.isa = static_cast<int>(made.isa);
        // What was kept for a program meanwhile lives until it is found.
        std::vector<std::shared_ptr<Kept>> found;
        for (int64_t i = 0; i < made.kept_count; i++)
            found.push_back(all_kept_[made.kept[i]].lock());
        code.kept.swap(found);
        program->saved_bytes = made.saved_bytes;
        for (auto at = made.outputs; at < made.outputs + made.output_count; at += 1 + *at)
            program->outputs.emplace_back(at + 1, at + 1 + *at);
        for (auto each = all_kept_.begin(); each != all_kept_.end();)
            each = each->second.expired() ? all_kept_.erase(each) : std::next(each);
        if (kept) {
            kept->memory = memory_of(made.bytes);
            all_kept_[made.number] = kept;
            program->kept.push_back(kept);
        }
        if (kept && !kept->memory) return false;
        return std::count(code.kept.begin(), code.kept.end(), nullptr) == 0;
    }

    // A call by MXNet; with gradients, its forward pass.
    MXReturnValue forward(const Arrays& in, const Arrays& out, Recorded* call) {
        for (const size_t place : places_[ECE408_SET_TO_1])
            std::fill_n(static_cast<float*>(in[place].data_ptr), in[place].size(), 1.f);
        const auto made = program_for(in);
        if (!made) return kRefused;
        Given given = given_of(in.data(), out.data());
        if (has_gradients_) record(made, call);
        const uint64_t version = has_gradients_ ? 0 : versions_.of(in, &given.versions);
        if (in_python_) return compute_in_python(*made, call->number, false, version, given);
        return has_gradients_ ? run_pass(*call, false, &given.bases)
                              : compute(*made, version, &given.bases);
    }

    // `in` are the gradients for the outputs, the inputs and the outputs.
    MXReturnValue backward(const Arrays& in, const Arrays& out, const Recorded& call) {
        const std::vector<size_t>& averages = places_[ECE408_MOVING_AVERAGE];
        if (!call.saved && call.number == 0) return kRefused;
        if (predicts && !averages.empty()) {
            run_python([] {
                return part_functions.report(0, nullptr, 0, 0, ECE408_PREDICTS, 0, -1);
            });
            return kRefused;
        }
        const MXTensor *const heads = in.data(), *const inputs = heads + outputs();
        Given given = given_of(inputs, heads);
        for (const size_t place : places_[ECE408_WANTED]) given.add(out[place]);
        if (in_python_) {
            for (const size_t place : averages) given.add(inputs[place]);
            return compute_in_python(*call.program, call.number, true, 0, given);
        }
        // Steps may read the averages until the last one.
        std::vector<std::vector<float>> moved;
        for (const size_t place : averages) {
            moved.emplace_back(inputs[place].size());
            given.bases.push_back(moved.back().data());
        }
        const MXReturnValue status = run_pass(call, true, &given.bases);
        for (size_t i = 0; status == MX_SUCCESS && i < averages.size(); i++)
            std::copy(moved[i].begin(), moved[i].end(),
                      static_cast<float*>(inputs[averages[i]].data_ptr));
        return status;
    }

    // A call on the caller's thread, as `ece408_part_call`.
    int call(void* const* inputs, void** results, int64_t most_bytes, uint64_t* version) {
        is_whole_ = true;
        std::vector<void*> reads;
        for (size_t i = 0; i < inputs_; i++)
            if (versions_.is_data(i)) reads.push_back(inputs[i]);
        if (!at_once(reads, [] { return 1; })) return 0;
        for (size_t i = 0; i < inputs_; i++)
            if (of_mxnet.wait_to_read(inputs[i]) != 0) return -1;
        Sizes data;
        int device = 0;
        for (void* const each : reads)
            if (!add(each, &data, &device)) return 0;
        const auto made = find(&Program::data, data);
        if (!made || made->bytes > most_bytes) return 0;
        // Kernels that do not read weights want some address of them.
        Bases bases(1 + types_.size(), made->kept.empty() ? nullptr : made->kept[0]->memory.get());
        for (size_t i = 0; i < inputs_; i++)
            if (versions_.is_data(i) && of_mxnet.data(inputs[i], &bases[1 + i]) != 0) return -1;
        for (const int64_t i : made->weights) {
            if (of_mxnet.data(inputs[i], &bases[static_cast<size_t>(1 + i)]) != 0) return -1;
            reads.push_back(inputs[i]);
        }
        return at_once(reads, [&] {
            const std::shared_lock<std::shared_mutex> reading(kept_);
            *version = versions_.unchanged(inputs);
            if (*version == 0 || !made->is_of(*version, true)) return 0;
            for (size_t i = 0; i < outputs(); i++) {
                const Shape& shape = made->outputs[i];
                if (of_mxnet.create(shape.data(), static_cast<unsigned>(shape.size()), kCpu, device,
                                    0, type(inputs_ + i), &results[i]) != 0 ||
                    of_mxnet.data(results[i], &bases[1 + inputs_ + i]) != 0)
                    return -1;
            }
            if (in_python_) return 2;
            const Memory arena = arenas_.lend(made->bytes);
            if (!arena) return 0;
            bases[0] = arena.get();
            add_kept(*made, &bases);
            return run(*made, bases) == MX_SUCCESS ? 1 : 0;
        });
    }

private:
    using Bases = std::vector<void*>;

    // The addresses of a call's arrays, behind its arena's, and MXNet's counts of writes to them.
    struct Given {
        Bases bases{nullptr};
        std::vector<uint64_t> versions;

        void add(const MXTensor& array) {
            bases.push_back(array.data_ptr);
            versions.push_back(array.verID);
        }
    };

    // The inputs, and the outputs or the gradients for them.
    Given given_of(const MXTensor* inputs, const MXTensor* outputs) const {
        Given given;
        given.bases.reserve(1 + types_.size());
        given.versions.reserve(types_.size());
        for (size_t i = 0; i < types_.size(); i++)
            given.add(i < inputs_ ? inputs[i] : outputs[i - inputs_]);
        return given;
    }

    static constexpr int kMostPrograms = 8;
    static constexpr int kCpu = 1;  // MXNet's number

    // Of the settings, of which shapes are independent.
    uint64_t generation() const { return in_python_ ? 0 : plans().generation(); }

    static void add_kept(const Code& code, Bases* bases) {
        for (const auto& each : code.kept) bases->push_back(each->memory.get());
    }

    MXReturnValue compute_in_python(const Program& program, int64_t call, bool is_backward,
                                    uint64_t version, const Given& given) const {
        return success_if(run_python([&] {
            return part_functions.compute(number, program.number, call, is_backward, version,
                                          given.versions.data(), &given.bases[1]);
        }));
    }

    // MXNet's own temporary memory has at most 2 GiB, and rotates among several.
    MXReturnValue compute(const Program& program, uint64_t version, Bases* bases) {
        const Memory arena = arenas_.lend(program.bytes);
        if (!arena) return kRefused;
        bases->front() = arena.get();
        add_kept(program, bases);
        std::shared_lock<std::shared_mutex> reading(kept_);
        if (program.is_of(version)) return run(program, *bases);
        // It stays locked for the call: another one may bring other weights.
        reading.unlock();
        const std::lock_guard<std::shared_mutex> writing(kept_);
        const MXReturnValue status = prepare(program, version, *bases);
        return status == MX_SUCCESS ? run(program, *bases) : status;
    }

    // Makes room for what the backward passes of a call read.
    void record(const std::shared_ptr<Program>& program, Recorded* call) {
        static std::atomic<int64_t> last{0};
        if (in_python_ && call->number == 0) call->number = ++last;
        if (call->program != program) call->saved.reset();
        call->program = program;
        if (!in_python_ && !call->saved) call->saved = saved_.lend(program->saved_bytes);
    }

    // Runs one of the passes on its arrays.
    MXReturnValue run_pass(const Recorded& call, bool is_backward, Bases* bases) {
        const Memory arena = arenas_.lend(call.program->bytes);
        if (!arena || !call.saved) return kRefused;
        bases->front() = arena.get();
        // Forward there are no results.
        bases->resize(1 + types_.size() + places_[ECE408_WANTED].size() +
                      places_[ECE408_MOVING_AVERAGE].size());
        bases->push_back(call.saved.get());
        return run(*call.program, *bases, is_backward);
    }

    // The program for the inputs of a call by MXNet; null if Python has reported why not.
    std::shared_ptr<Program> program_for(const Arrays& in) {
        Sizes sizes;
        for (const MXTensor& array : in) ece408::add(array.dtype, array.shape, &sizes);
        return program(sizes, true);
    }

    // The program of the current settings with these sizes, which becomes the first of all.
    std::shared_ptr<Program> find(Sizes Program::*which, const Sizes& sizes) {
        const uint64_t generation = this->generation();
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto each = programs_.begin(); each != programs_.end(); ++each) {
            if ((*each)->generation != generation || (**each).*which != sizes) continue;
            programs_.splice(programs_.begin(), programs_, each);
            return programs_.front();
        }
        return nullptr;
    }

    // Makes what is kept of weights whose addresses `bases` has after the first.
    MXReturnValue prepare(const Program& program, uint64_t version, const Bases& bases) const {
        for (const auto& kept : program.kept) {
            if (kept->version == version) continue;
            kept->version = 0;
            Bases own(bases.begin(), bases.begin() + 1 + static_cast<int64_t>(inputs_));
            add_kept(*kept, &own);
            own.push_back(kept->memory.get());
            const MXReturnValue status = run(*kept, own);
            if (status != MX_SUCCESS) return status;
            const auto is_packed = [&](int64_t place) {
                return *reinterpret_cast<const int32_t*>(kept->memory.get() + place) == 1;
            };
            kept->is_packed = std::all_of(kept->weights.begin(), kept->weights.end(), is_packed);
            kept->version = version;
        }
        return MX_SUCCESS;
    }

    // The steps of a call, or of one of the passes. Those of weights have no op times.
    MXReturnValue run(const Code& code, const Bases& bases, bool is_backward = false) const {
        const int64_t first = is_backward ? code.forward_steps : 0;
        const auto all = static_cast<int64_t>(code.steps.size());
        const int64_t count = is_backward ? all - first : code.forward_steps;
        const ece408_step* steps = code.steps.data() + first;
        const auto& functions = plans().functions();
        const int threads = plans().threads();
        const bool is_timed = plans().logs && code.number < 0, uses_workers = is_whole_;
        std::vector<double> seconds(is_timed ? static_cast<size_t>(count) : 0);
        int64_t failed = 0;
        // OpenMP would count the threads of the caller's thread and of MXNet's. Beside operators of
        // MXNet's its threads spin.
        if (uses_workers) functions.use_workers(threads);
        const int status = functions.run(steps, count, bases.data(), threads, code.isa,
                                         is_timed ? seconds.data() : nullptr, &failed);
        if (uses_workers) functions.use_workers(0);
        if (status == ECE408_OK && !is_timed) return MX_SUCCESS;
        const int is_reported = run_python([&] {
            return part_functions.report(code.number, seconds.data(), first, is_timed ? count : 0,
                                         status, failed, count == 0 ? -1 : steps[failed].kind);
        });
        return success_if(status == ECE408_OK && is_reported);
    }

    const std::vector<int> types_;
    const size_t inputs_;
    const bool in_python_;
    bool has_gradients_ = false;
    std::array<std::vector<size_t>, ECE408_USES> places_;  // of inputs, by their use
    std::atomic<bool> is_whole_{false};  // whether it is a whole graph, whose calls can be direct
    Versions versions_;
    std::shared_mutex kept_;  // protects what programs keep of weights
    std::mutex making_;       // held while Python makes a program; protects `all_kept_`
    std::map<int64_t, std::weak_ptr<Kept>> all_kept_;
    std::mutex mutex_;        // protects the following
    std::list<std::shared_ptr<Program>> programs_;  // the last used first
    Lender arenas_, saved_;
};

}  // namespace ece408
