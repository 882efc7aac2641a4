// A part of a graph and its programs (kernels/cpu/network/program.h), which Python makes.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>
#include <optional>
#include <shared_mutex>
#include <thread>
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

// The result of a function that calls Python.
template <typename Function>
MXReturnValue by_python(const Function& function) {
    return success_if(run_python(function) != 0);
}

struct Kept;

// Steps that Python has made, and what is kept that they read.
struct Code {
    int64_t number = 0;  // Python's, negative for programs
    std::vector<ece408_step> steps;
    std::vector<std::shared_ptr<Kept>> kept;
    int64_t bytes = 0;
    int isa = 0;

    Code() = default;
    Code(const Code&) = delete;
    ~Code() {
        if (number != 0) run_python([this] { return part_functions.forget(number); });
    }
};

// What programs of a part keep of its weights.
struct Kept : Code {
    std::vector<int64_t> packed;  // where packed weights begin
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
    std::vector<int64_t> reads;  // weights, besides what is kept
    int64_t forward_steps = 0, saved_bytes = 0;  // of one with gradients
    uint64_t generation = 0;  // of the settings

    bool is_of(uint64_t version) const {
        return std::all_of(kept.begin(), kept.end(),
                           [&](const auto& each) { return each->version == version; });
    }
    // Whether it reads no other weights.
    bool is_packed() const {
        const auto is = [](const auto& each) { return each->is_packed; };
        return std::all_of(kept.begin(), kept.end(), is);
    }
};

namespace ece408 {

using Program = ece408_program;

// The inputs of a part whose gradients are wanted, those that are moving averages, and those that
// training sets to 1, as MXNet's BatchNorm does with a fixed gamma.
struct Gradients {
    std::vector<size_t> wanted, averages, ones;
};

// A call of a part with gradients, from its forward pass on: what its backward passes read.
struct Recorded {
    std::shared_ptr<Program> program;
    Memory saved;
    int64_t number = 0;  // if Python computes it

    Recorded() = default;
    Recorded(const Recorded&) = delete;
    ~Recorded() {
        if (number != 0) run_python([this] { return part_functions.end(number); });
    }
};

class Part {
public:
    using Arrays = std::vector<MXTensor>;

    // `kinds` has the kind of each input; `types` are those of inputs and outputs.
    Part(int number, const std::string& kinds, std::vector<int> types, bool in_python)
        : number_(number),
          types_(std::move(types)),
          inputs_(kinds.size()),
          in_python_(in_python),
          versions_(kinds) {}

    Part(const Part&) = delete;
    ~Part() {
        std::list<std::shared_ptr<Program>>().swap(programs_);
        run_python([this] { return part_functions.close(number_); });
    }

    size_t inputs() const { return inputs_; }
    size_t outputs() const { return types_.size() - inputs_; }
    int type(size_t array) const { return types_[array]; }
    bool has_gradients() const { return gradients_.has_value(); }
    void set(Gradients gradients) { gradients_ = std::move(gradients); }

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
            return part_functions.make(number_, sizes.data(), static_cast<int64_t>(sizes.size()),
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

    // Takes the code that Python made; false if something that it reads is not kept any more.
    bool take(const ece408_code& made, Code* code) {
        code->number = made.number;
        code->steps.assign(made.steps, made.steps + made.step_count);
        code->bytes = made.bytes;
        code->isa = static_cast<int>(made.isa);
        // What was kept for a program meanwhile lives until it is found.
        std::vector<std::shared_ptr<Kept>> found;
        for (int64_t i = 0; i < made.kept_count; i++)
            found.push_back(all_kept_[made.kept[i]].lock());
        code->kept.swap(found);
        return std::count(code->kept.begin(), code->kept.end(), nullptr) == 0;
    }

    // Takes what a program, and later ones, keep of weights; false if there is no room.
    bool keep(const ece408_code& made, Program* program) {
        const auto kept = std::make_shared<Kept>();
        kept->packed.assign(made.packed, made.packed + made.packed_count);
        kept->memory = memory_of(made.bytes);
        const bool has_all = take(made, kept.get());
        for (auto each = all_kept_.begin(); each != all_kept_.end();)
            each = each->second.expired() ? all_kept_.erase(each) : std::next(each);
        all_kept_[made.number] = kept;
        program->kept.push_back(kept);
        return kept->memory && has_all;
    }

    // A call by MXNet. MXNet's own temporary memory has at most 2 GiB, and rotates among several.
    MXReturnValue compute(const Arrays& in, const Arrays& out) {
        const auto made = program_for(in);
        if (!made) return kRefused;
        std::vector<uint64_t> versions(inputs_);
        const uint64_t version = versions_.of(in, &versions);
        Bases bases(1 + types_.size());
        put(in.data(), inputs_, &bases[1]);
        put(out.data(), outputs(), &bases[1 + inputs_]);
        if (in_python_)
            return by_python([&] {
                return part_functions.compute(number_, made->number, version, versions.data(),
                                              &bases[1]);
            });
        const Memory arena = arenas_.lend(made->bytes);
        if (!arena) return kRefused;
        bases[0] = arena.get();
        add_kept(*made, &bases);
        const Workers workers(is_whole_);
        std::shared_lock<std::shared_mutex> reading(kept_);
        if (made->is_of(version)) return run(*made, bases);
        // It stays locked for the call: another one may bring other weights.
        reading.unlock();
        const std::lock_guard<std::shared_mutex> writing(kept_);
        const MXReturnValue status = prepare(*made, version, bases);
        return status == MX_SUCCESS ? run(*made, bases) : status;
    }

    // The passes of a part with gradients. Operands are in the arena, the inputs, the gradients
    // for the outputs, the outputs, the wanted gradients, the new averages, and what is saved.
    MXReturnValue forward(const Arrays& in, const Arrays& out, Recorded* call) {
        for (const size_t place : gradients_->ones)
            std::fill_n(static_cast<float*>(in[place].data_ptr), in[place].size(), 1.f);
        const auto made = program_for(in);
        if (!made) return kRefused;
        if (call->program != made) call->saved.reset();
        call->program = made;
        if (in_python_) {
            static std::atomic<int64_t> last{0};
            if (call->number == 0) call->number = ++last;
            Pointers arrays;
            add(in.data(), inputs_, &arrays);
            add(out.data(), outputs(), &arrays);
            return pass_in_python(*call, 0, arrays);
        }
        if (!call->saved) call->saved = saved_.lend(made->saved_bytes);
        const Memory arena = arenas_.lend(made->bytes);
        if (!arena || !call->saved) return kRefused;
        Bases bases = bases_of_pass(arena, *call);
        put(in.data(), inputs_, &bases[1]);
        put(out.data(), outputs(), &bases[1 + types_.size()]);
        return run(*made, bases, 0, made->forward_steps);
    }

    // `in` are the gradients for the outputs, the inputs and the outputs.
    MXReturnValue backward(const Arrays& in, const Arrays& out, const Recorded& call) {
        if (!call.saved && call.number == 0) return kRefused;
        if (predicts && !gradients_->averages.empty()) {
            run_python([] {
                return part_functions.report(0, nullptr, 0, 0, ECE408_PREDICTS, 0, -1);
            });
            return kRefused;
        }
        const MXTensor *const heads = in.data(), *const inputs = heads + outputs();
        if (in_python_) {
            Pointers arrays;
            add(inputs, inputs_, &arrays);
            add(heads, outputs(), &arrays);
            for (const size_t place : gradients_->wanted) arrays.push_back(&out[place]);
            for (const size_t place : gradients_->averages) arrays.push_back(&inputs[place]);
            return pass_in_python(call, 1, arrays);
        }
        const Program& program = *call.program;
        // Steps may read the averages until the last one: the new ones are behind the arena.
        const auto bytes_of = [&](size_t place) { return inputs[place].size() * sizeof(float); };
        size_t bytes = static_cast<size_t>(program.bytes);
        for (const size_t place : gradients_->averages) bytes += bytes_of(place);
        const Memory arena = arenas_.lend(static_cast<int64_t>(bytes));
        if (!arena) return kRefused;
        Bases bases = bases_of_pass(arena, call);
        put(inputs, inputs_, &bases[1]);
        put(heads, outputs(), &bases[1 + inputs_]);
        void** result = &bases[1 + inputs_ + 2 * outputs()];
        for (const size_t place : gradients_->wanted) *result++ = out[place].data_ptr;
        void* const* moved = result;
        char* end = arena.get() + program.bytes;
        for (const size_t place : gradients_->averages) {
            *result++ = end;
            end += bytes_of(place);
        }
        const auto steps = static_cast<int64_t>(program.steps.size());
        const MXReturnValue status = run(program, bases, program.forward_steps, steps);
        if (status != MX_SUCCESS) return status;
        for (const size_t place : gradients_->averages)
            std::memcpy(inputs[place].data_ptr, *moved++, bytes_of(place));
        return MX_SUCCESS;
    }

    // A call on the caller's thread, as `ece408_part_call`.
    int call(void* const* inputs, void** results, int64_t most_bytes, const ece408_mxnet& mxnet,
             uint64_t* version) {
        is_whole_ = true;
        std::vector<void*> reads;
        for (size_t i = 0; i < inputs_; i++)
            if (versions_.is_data(i)) reads.push_back(inputs[i]);
        if (!at_once(reads, mxnet, [] { return 1; })) return 0;
        for (size_t i = 0; i < inputs_; i++)
            if (mxnet.wait_to_read(inputs[i]) != 0) return -1;
        int device = 0;
        const auto made = known(inputs, &device);
        if (!made || made->bytes > most_bytes) return 0;
        // Kernels that do not read weights want some address of them.
        Bases bases(1 + types_.size(), made->kept.empty() ? nullptr : made->kept[0]->memory.get());
        for (size_t i = 0; i < inputs_; i++)
            if (versions_.is_data(i) && mxnet.data(inputs[i], &bases[1 + i]) != 0) return -1;
        for (const int64_t i : made->reads) {
            if (mxnet.data(inputs[i], &bases[static_cast<size_t>(1 + i)]) != 0) return -1;
            reads.push_back(inputs[i]);
        }
        return at_once(reads, mxnet, [&] {
            const std::shared_lock<std::shared_mutex> reading(kept_);
            *version = versions_.unchanged(inputs);
            if (*version == 0 || !made->is_of(*version) || !made->is_packed()) return 0;
            for (size_t i = 0; i < outputs(); i++) {
                const Shape& shape = made->outputs[i];
                if (mxnet.create(shape.data(), static_cast<unsigned>(shape.size()), kCpu, device, 0,
                                 type(inputs_ + i), &results[i]) != 0 ||
                    mxnet.data(results[i], &bases[1 + inputs_ + i]) != 0)
                    return -1;
            }
            if (in_python_) return 2;
            const Memory arena = arenas_.lend(made->bytes);
            if (!arena) return 0;
            bases[0] = arena.get();
            add_kept(*made, &bases);
            const Workers workers(true);
            return run(*made, bases) == MX_SUCCESS ? 1 : 0;
        });
    }

private:
    using Bases = std::vector<void*>;
    using Pointers = std::vector<const MXTensor*>;

    // While one lives, this package's workers help this thread, if `are_used`: OpenMP would count
    // the threads of the caller's thread and of MXNet's. Beside operators of MXNet's its threads
    // spin.
    struct Workers {
        explicit Workers(bool are_used) : are_used_(are_used) {
            if (are_used_) plans().functions().use_workers(plans().threads());
        }
        Workers(const Workers&) = delete;
        ~Workers() {
            if (are_used_) plans().functions().use_workers(0);
        }
        const bool are_used_;
    };

    static constexpr int kMostPrograms = 8;
    static constexpr int kCpu = 1;  // MXNet's number

    // Of the settings, of which shapes are independent.
    uint64_t generation() const { return in_python_ ? 0 : plans().generation(); }

    static void put(const MXTensor* arrays, size_t count, void** bases) {
        for (size_t i = 0; i < count; i++) bases[i] = arrays[i].data_ptr;
    }

    static void add(const MXTensor* arrays, size_t count, Pointers* found) {
        for (size_t i = 0; i < count; i++) found->push_back(&arrays[i]);
    }

    static void add_kept(const Code& code, Bases* bases) {
        for (const auto& each : code.kept) bases->push_back(each->memory.get());
    }

    // The arena and what is saved; arrays follow, except those of the other pass.
    Bases bases_of_pass(const Memory& arena, const Recorded& call) const {
        const size_t results = gradients_->wanted.size() + gradients_->averages.size();
        Bases bases(2 + inputs_ + 2 * outputs() + results);
        bases.front() = arena.get();
        bases.back() = call.saved.get();
        return bases;
    }

    MXReturnValue pass_in_python(const Recorded& call, int backward, const Pointers& arrays) const {
        std::vector<uint64_t> versions;
        std::vector<void*> addresses;
        for (const MXTensor* array : arrays) {
            versions.push_back(array->verID);
            addresses.push_back(array->data_ptr);
        }
        return by_python([&] {
            return part_functions.pass(number_, call.program->number, call.number, backward,
                                       versions.data(), addresses.data());
        });
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

    // What `work` returns, on this thread, or 0, without it, if the arrays have pending writes or
    // failures. Later writes by MXNet wait for its end.
    template <typename Work>
    static int at_once(const std::vector<void*>& reads, const ece408_mxnet& mxnet, Work work) {
        struct Task {
            std::thread::id caller;
            Work* work;
            int result;
        };
        using Shared = std::shared_ptr<Task>;
        const Shared task(new Task{std::this_thread::get_id(), &work, 0});
        const auto run = [](void*, void* given) {
            Task& task = **static_cast<Shared*>(given);
            // After a wait MXNet runs it on another thread, or when the caller has gone.
            if (std::this_thread::get_id() == task.caller && task.work) task.result = (*task.work)();
        };
        const auto end = [](void* task) { delete static_cast<Shared*>(task); };
        const int status = mxnet.push(run, new Shared(task), end, first_cpu(), reads.data(),
                                      static_cast<int>(reads.size()), nullptr, 0, run_at_once(), 0,
                                      "ece408_part");
        task->work = nullptr;
        return status == 0 ? task->result : 0;
    }

    // The program for data of these handles, and its device.
    std::shared_ptr<Program> known(void* const* inputs, int* device) {
        Sizes data;
        for (size_t i = 0; i < inputs_; i++)
            if (versions_.is_data(i) && !ece408::add(inputs[i], &data, device)) return nullptr;
        return find(&Program::data, data);
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
            kept->is_packed = std::all_of(kept->packed.begin(), kept->packed.end(), is_packed);
            kept->version = version;
        }
        return MX_SUCCESS;
    }

    static MXReturnValue run(const Code& code, const Bases& bases) {
        return run(code, bases, 0, static_cast<int64_t>(code.steps.size()));
    }

    // The steps from `first` to before `last`. Those of weights have no op times.
    static MXReturnValue run(const Code& code, const Bases& bases, int64_t first, int64_t last) {
        const int64_t count = last - first;
        const ece408_step* steps = code.steps.data() + first;
        const bool is_timed = plans().logs && code.number < 0;
        std::vector<double> seconds(is_timed ? static_cast<size_t>(count) : 0);
        int64_t failed = 0;
        const int status =
            plans().functions().run(steps, count, bases.data(), plans().threads(), code.isa,
                                    is_timed ? seconds.data() : nullptr, &failed);
        if (status == ECE408_OK && !is_timed) return MX_SUCCESS;
        const MXReturnValue reported = by_python([&] {
            return part_functions.report(code.number, seconds.data(), first, is_timed ? count : 0,
                                         status, failed, count == 0 ? -1 : steps[failed].kind);
        });
        return status == ECE408_OK ? reported : kRefused;
    }

    const int number_;
    const std::vector<int> types_;
    const size_t inputs_;
    const bool in_python_;
    std::optional<Gradients> gradients_;
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
