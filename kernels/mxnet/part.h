// A part of a graph and its programs (kernels/cpu/network/program.h), which Python makes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../cpu/host/pages.h"
#include "array_handles.h"
#include "callbacks.h"
#include "library.h"
#include "plans.h"
#include "python_calls.h"
#include "versions.h"

namespace ece408 {

class Part;

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

// Bytes from a cache line on, for large arrays in huge pages; null if there is no room.
inline Memory memory_of(int64_t bytes) {
    constexpr size_t kLine = 64;
    const size_t lines = static_cast<size_t>(bytes) / kLine + 1;
    Memory made(static_cast<char*>(std::aligned_alloc(kLine, lines * kLine)));
    if (made) ask_for_huge_pages(made.get(), bytes);
    return made;
}

// Memory that is lent, and kept for the next loan when it comes back.
class Lender {
public:
    struct GiveBack {
        Lender* lender = nullptr;
        int64_t bytes = 0;
        void operator()(char* memory) const { lender->keep(memory, bytes); }
    };
    // It may not outlive the lender.
    using Loan = std::unique_ptr<char, GiveBack>;

    // At least as many bytes, or null if there is no room.
    Loan lend(int64_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!memory_ || bytes_ < bytes) return {memory_of(bytes).release(), {this, bytes}};
        return {memory_.release(), {this, bytes_}};
    }

private:
    void keep(char* memory, int64_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        memory_.reset(memory);
        bytes_ = bytes;
    }

    std::mutex mutex_;
    Memory memory_;
    int64_t bytes_ = 0;
};

// Whether backward passes are of prediction.
inline std::atomic<bool> predicts{false};

// Python's functions.
inline ece408_part_functions part_functions{};

struct Kept;

// Steps that Python has made, and what is kept that they read.
struct Code {
    int64_t number = 0;  // Python's
    std::vector<ece408_step> steps;
    std::vector<std::shared_ptr<Kept>> kept;
    int64_t bytes = 0;

    Code() = default;
    Code(const Code&) = delete;
    ~Code() {
        if (number != 0) run_python([this] { return part_functions.forget(number); });
    }

    // False if something is not kept any more.
    bool take(const ece408_code& made, Part* part);
};

// What programs of a part keep of its weights.
struct Kept : Code {
    std::vector<int64_t> packed;  // where packed weights begin
    Memory memory;
    uint64_t version = 0;  // of the weights in it
    bool is_packed = false;  // whether all could be packed
};

}  // namespace ece408

// What Python makes for inputs of one set of shapes.
struct ece408_program : ece408::Code {
    ece408::Part* part = nullptr;
    ece408::Sizes sizes, data;  // of all inputs, and of data
    std::vector<Shape> outputs;
    std::vector<int64_t> reads;  // weights, besides what is kept
    int64_t forward_steps = 0, saved_bytes = 0;  // of one with gradients
    int isa = 0;
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
    std::vector<int> wanted, averages, ones;
};

// A call of a part with gradients, from its forward pass on: what its backward passes read.
struct Recorded {
    std::shared_ptr<Program> program;
    Lender::Loan saved;
    int64_t number = 0;  // if Python computes it

    Recorded() = default;
    Recorded(const Recorded&) = delete;
    ~Recorded() {
        if (number != 0) run_python([this] { return part_functions.end(number); });
    }
};

class Part {
public:
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
    bool has_gradients() const { return has_gradients_; }
    void set(Gradients gradients) {
        gradients_ = std::move(gradients);
        has_gradients_ = true;
    }

    // Other arrays come, and no call is in progress.
    void forget(const std::string& kinds) { versions_.forget(kinds); }

    // The program for inputs of these sizes; null if Python refuses. `is_call`: a call waits for it, on
    // a thread of MXNet's.
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
        auto end = sizes.begin();
        for (size_t i = 0; i < inputs_; i++) {
            const auto begin = end;
            end += 2 + begin[1];
            if (versions_.is_data(i)) made->data.insert(made->data.end(), begin, end);
        }
        const auto make = [&] {
            return part_functions.make(number_, sizes.data(), static_cast<int64_t>(sizes.size()),
                                       made.get(), is_call);
        };
        if (!(is_call ? run_python(make) : ask_python(make))) return nullptr;
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

    // Adds what is kept, or finds it by its number.
    void add(const std::shared_ptr<Kept>& kept) {
        for (auto each = all_kept_.begin(); each != all_kept_.end();)
            each = each->second.expired() ? all_kept_.erase(each) : std::next(each);
        all_kept_[kept->number] = kept;
    }
    std::shared_ptr<Kept> kept(int64_t number) {
        const auto found = all_kept_.find(number);
        return found == all_kept_.end() ? nullptr : found->second.lock();
    }

    // A call by MXNet. MXNet's own temporary memory has at most 2 GiB, and rotates among several.
    MXReturnValue compute(std::vector<MXTensor>* in, std::vector<MXTensor>* out) {
        if (in_python_) return compute_in_python(*in, *out);
        const auto made = program_for(*in);
        if (!made) return kRefused;
        const Lender::Loan arena = arenas_.lend(made->bytes);
        const Bases bases = bases_of(*made, arena.get(), *in, *out);
        if (!bases[0]) return kRefused;
        const Workers workers(is_whole_);
        const uint64_t version = versions_.of(*in);
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
    MXReturnValue forward(std::vector<MXTensor>* in, std::vector<MXTensor>* out, Recorded* call) {
        for (const int place : gradients_.ones) {
            const MXTensor& gamma = (*in)[static_cast<size_t>(place)];
            std::fill_n(static_cast<float*>(gamma.data_ptr), gamma.size(), 1.f);
        }
        auto made = program_for(*in);
        if (!made) return kRefused;
        if (in_python_) {
            static std::atomic<int64_t> last{0};
            if (call->number == 0) call->number = ++last;
            call->program = std::move(made);
            auto arrays = pointers(*in, 0, in->size());
            for (const MXTensor* array : pointers(*out, 0, out->size())) arrays.push_back(array);
            return pass_in_python(*call, 0, arrays);
        }
        if (!call->saved.get() || call->program != made) {
            call->saved.reset();
            call->program = std::move(made);
            call->saved = saved_.lend(call->program->saved_bytes);
        }
        const Program& program = *call->program;
        const Lender::Loan arena = arenas_.lend(program.bytes);
        Bases bases{arena.get()};
        if (!arena.get() || !call->saved.get()) return kRefused;
        add(*in, &bases);
        bases.resize(bases.size() + out->size(), nullptr);
        add(*out, &bases);
        bases.resize(bases.size() + gradients_.wanted.size() + gradients_.averages.size(), nullptr);
        bases.push_back(call->saved.get());
        return run(program, bases, 0, program.forward_steps);
    }

    // `in` are the gradients for the outputs, the inputs and the outputs.
    MXReturnValue backward(const std::vector<MXTensor>& in, std::vector<MXTensor>* out,
                           const Recorded& call) {
        if (!call.saved.get() && call.number == 0) return kRefused;
        if (predicts && !gradients_.averages.empty()) {
            run_python([&] {
                return part_functions.report(0, nullptr, 0, 0, ECE408_PREDICTS, 0, -1);
            });
            return kRefused;
        }
        const auto average = [&](int place) -> const MXTensor& {
            return in[outputs() + static_cast<size_t>(place)];
        };
        if (in_python_) {
            auto arrays = pointers(in, outputs(), inputs_);
            for (const MXTensor* head : pointers(in, 0, outputs())) arrays.push_back(head);
            for (const int place : gradients_.wanted)
                arrays.push_back(&(*out)[static_cast<size_t>(place)]);
            for (const int place : gradients_.averages) arrays.push_back(&average(place));
            return pass_in_python(call, 1, arrays);
        }
        const Program& program = *call.program;
        int64_t bytes = program.bytes;
        std::vector<int64_t> places;  // of new averages, which steps may read until the last one
        for (const int place : gradients_.averages) {
            places.push_back(bytes);
            bytes += static_cast<int64_t>(average(place).size() * sizeof(float));
        }
        const Lender::Loan arena = arenas_.lend(bytes);
        Bases bases{arena.get()};
        if (!bases[0]) return kRefused;
        for (size_t i = 0; i < inputs_; i++) bases.push_back(in[outputs() + i].data_ptr);
        for (size_t i = 0; i < outputs(); i++) bases.push_back(in[i].data_ptr);
        bases.resize(bases.size() + outputs(), nullptr);
        for (const int place : gradients_.wanted)
            bases.push_back((*out)[static_cast<size_t>(place)].data_ptr);
        for (const int64_t place : places) bases.push_back(arena.get() + place);
        bases.push_back(call.saved.get());
        const auto last = static_cast<int64_t>(program.steps.size());
        const MXReturnValue status = run(program, bases, program.forward_steps, last);
        for (size_t i = 0; status == MX_SUCCESS && i < places.size(); i++) {
            const MXTensor& moved = average(gradients_.averages[i]);
            std::memcpy(moved.data_ptr, arena.get() + places[i], moved.size() * sizeof(float));
        }
        return status;
    }

    // A call on the caller's thread, without MXNet's CachedOp, by handles. 1, with new arrays in
    // `results`, if the weights are as in the last call by MXNet; 2 if Python must compute these, of
    // weights of this version; 0 if it is impossible; -1 if MXNet failed. The caller frees
    // `results`.
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
            const Lender::Loan arena = arenas_.lend(made->bytes);
            bases[0] = arena.get();
            if (!bases[0]) return 0;
            for (const auto& each : made->kept) bases.push_back(each->memory.get());
            const Workers workers(true);
            return run(*made, bases) == MX_SUCCESS ? 1 : 0;
        });
    }

private:
    using Bases = std::vector<void*>;

    // While one lives, this package's workers help this thread, if `are_used`: OpenMP would count the
    // threads of the caller's thread and of MXNet's. Beside operators of MXNet's its threads spin.
    struct Workers {
        explicit Workers(bool are_used) : are_used_(are_used) {
            if (are_used_) plans().others().use_workers(plans().threads());
        }
        Workers(const Workers&) = delete;
        ~Workers() {
            if (are_used_) plans().others().use_workers(0);
        }
        const bool are_used_;
    };

    static constexpr size_t kMostPrograms = 8;
    static constexpr int kCpu = 1;  // MXNet's number

    // Of the settings, of which shapes are independent.
    uint64_t generation() const { return in_python_ ? 0 : plans().generation(); }

    MXReturnValue compute_in_python(const std::vector<MXTensor>& in,
                                    const std::vector<MXTensor>& out) {
        const auto made = program_for(in);
        if (!made) return kRefused;
        std::vector<uint64_t> versions(in.size());
        const uint64_t version = versions_.of(in, &versions);
        Bases addresses;
        add(in, &addresses);
        add(out, &addresses);
        const int is_done = run_python([&] {
            return part_functions.compute(number_, made->number, version, versions.data(),
                                          addresses.data());
        });
        return is_done ? MX_SUCCESS : kRefused;
    }

    using Pointers = std::vector<const MXTensor*>;

    // `count` arrays from `first` on.
    static Pointers pointers(const std::vector<MXTensor>& arrays, size_t first, size_t count) {
        Pointers found;
        for (size_t i = first; i < first + count; i++) found.push_back(&arrays[i]);
        return found;
    }

    MXReturnValue pass_in_python(const Recorded& call, int backward, const Pointers& arrays) const {
        std::vector<uint64_t> versions;
        std::vector<void*> addresses;
        for (const MXTensor* array : arrays) {
            versions.push_back(array->verID);
            addresses.push_back(array->data_ptr);
        }
        const int is_done = run_python([&] {
            return part_functions.pass(number_, call.program->number, call.number, backward,
                                       versions.data(), addresses.data());
        });
        return is_done ? MX_SUCCESS : kRefused;
    }

    // The program for the inputs of a call by MXNet; null if Python has reported why not.
    std::shared_ptr<Program> program_for(const std::vector<MXTensor>& in) {
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

    static void add(const std::vector<MXTensor>& arrays, Bases* bases) {
        for (const MXTensor& array : arrays) bases->push_back(array.data_ptr);
    }

    static Bases bases_of(const Program& program, char* arena, const std::vector<MXTensor>& in,
                          const std::vector<MXTensor>& out) {
        Bases bases{arena};
        add(in, &bases);
        add(out, &bases);
        for (const auto& each : program.kept) bases.push_back(each->memory.get());
        return bases;
    }

    // Makes what is kept of weights whose addresses `bases` has after the first.
    MXReturnValue prepare(const Program& program, uint64_t version, const Bases& bases) const {
        for (const auto& kept : program.kept) {
            if (kept->version == version) continue;
            kept->version = 0;
            Bases own(bases.begin(), bases.begin() + 1 + static_cast<int64_t>(inputs_));
            for (const auto& each : kept->kept) own.push_back(each->memory.get());
            own.push_back(kept->memory.get());
            const auto count = static_cast<int64_t>(kept->steps.size());
            const MXReturnValue status = run(program, kept->steps.data(), count, own, -1);
            if (status != MX_SUCCESS) return status;
            const auto is_packed = [&](int64_t place) {
                return *reinterpret_cast<const int32_t*>(kept->memory.get() + place) == 1;
            };
            kept->is_packed = std::all_of(kept->packed.begin(), kept->packed.end(), is_packed);
            kept->version = version;
        }
        return MX_SUCCESS;
    }

    static MXReturnValue run(const Program& program, const Bases& bases) {
        return run(program, bases, 0, static_cast<int64_t>(program.steps.size()));
    }

    // The steps of a program from `first` to before `last`.
    static MXReturnValue run(const Program& program, const Bases& bases, int64_t first,
                             int64_t last) {
        return run(program, program.steps.data() + first, last - first, bases, first);
    }

    // Steps, of which the first has this number in the program; a negative one if they are others.
    static MXReturnValue run(const Program& program, const ece408_step* steps, int64_t count,
                             const Bases& bases, int64_t first) {
        const bool is_timed = plans().logs() && first >= 0;
        std::vector<double> seconds(is_timed ? static_cast<size_t>(count) : 0);
        int64_t failed = 0;
        const int status =
            plans().others().run(steps, count, bases.data(), plans().threads(), program.isa,
                                 is_timed ? seconds.data() : nullptr, &failed);
        if (status == ECE408_OK && !is_timed) return MX_SUCCESS;
        const int is_done = run_python([&] {
            return part_functions.report(program.number, seconds.data(), first,
                                         is_timed ? count : 0, status, failed,
                                         count == 0 ? -1 : steps[failed].kind);
        });
        return status == ECE408_OK && is_done ? MX_SUCCESS : kRefused;
    }

    const int number_;
    const std::vector<int> types_;
    const size_t inputs_;
    const bool in_python_;
    Gradients gradients_;
    bool has_gradients_ = false;
    std::atomic<bool> is_whole_{false};  // whether it is a whole graph, whose calls can be direct
    Versions versions_;
    std::shared_mutex kept_;  // protects what programs keep of weights
    std::mutex making_;       // held while Python makes a program; protects `all_kept_`
    std::map<int64_t, std::weak_ptr<Kept>> all_kept_;
    std::mutex mutex_;        // protects the following
    std::list<std::shared_ptr<Program>> programs_;  // the last used first
    Lender arenas_, saved_;
};

inline bool Code::take(const ece408_code& made, Part* part) {
    number = made.number;
    steps.assign(made.steps, made.steps + made.step_count);
    bytes = made.bytes;
    // What was kept for a program meanwhile lives until it is found.
    std::vector<std::shared_ptr<Kept>> found;
    for (int64_t i = 0; i < made.kept_count; i++) found.push_back(part->kept(made.kept[i]));
    kept.swap(found);
    return std::all_of(kept.begin(), kept.end(), [](const auto& each) { return each != nullptr; });
}

}  // namespace ece408
