// Calls of a sequence that is a whole graph, without MXNet's CachedOp. A CachedOp takes a tenth of
// a millisecond for a graph of one node, then wakes a thread of MXNet's that computes the node,
// which wakes the caller: 0.3 ms in all, beside 2.1 ms of work in mobilenetv2_1.0.
//
// MXNet's engine orders these calls among all others by the arrays that they read and write. An
// asynchronous function without dependencies runs in the pushing thread.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../cpu/host/buffer.h"
#include "array_handles.h"
#include "callbacks.h"
#include "held.h"
#include "operators.h"
#include "sequence.h"

// Of Python's stable interface.
extern "C" {
struct PyThreadState;
PyThreadState* PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState* state);
}

namespace {

// A call with a larger workspace takes so long that its caller may want to continue meanwhile.
constexpr size_t kMostBytes = size_t{32} << 20;
// MXNet's number of the CPU.
constexpr int kCpu = 1;

// An input of the sequence: the call's data of this number, or a parameter.
struct Input {
    int number;
    void* parameter;
    Shape shape;

    bool is_data() const { return number >= 0; }
};

// While one lives, workers help this thread's kernels.
class OwnWorkers {
public:
    OwnWorkers() { plans_.others().use_workers(plans_.threads()); }
    OwnWorkers(const OwnWorkers&) = delete;
    ~OwnWorkers() { plans_.others().use_workers(0); }

private:
    ece408::Plans& plans_ = ece408::plans();
};

class Calls : public std::enable_shared_from_this<Calls> {
public:
    explicit Calls(const ece408_mxnet& mxnet) : mxnet_(mxnet) {}

    // Makes the sequence, with `inputs` and an extra array that it does not read; false if it
    // cannot be called in this way.
    bool start(const Attributes& attributes, std::vector<Input> inputs, void* unread, int outputs);

    // As ece408_direct_call.
    int call(void* const* data, void* const* held, void** results);

private:
    struct Place {
        void* data = nullptr;
        size_t writes = 0;
    };

    // A call in MXNet's engine.
    struct Task {
        std::shared_ptr<Calls> calls;
        std::vector<Place> in;
        std::vector<void*> out;
    };

    bool is_usual(void* const* data) const;
    bool is_usual(const Input& input, void* array) const;
    bool are_there(void* const* data) const;
    bool take(void* const* data, Task* task, std::vector<void*>* reads) const;
    bool make(void** results, Task* task) const;
    int push(std::vector<void*> reads, void* const* results, std::unique_ptr<Task> task);
    static void run(void*, void* task);
    void compute(const Task& task);

    const ece408_mxnet mxnet_;
    std::vector<Input> inputs_;
    std::vector<ece408::ArrayPlaces> places_;  // of parameters
    void* unread_ = nullptr;
    std::shared_ptr<ece408::Held> held_;
    std::unique_ptr<mxnet::ext::CustomStatefulOp> run_;
    std::vector<MXTensor> in_, out_;
    std::vector<Shape> results_;
    ece408::Buffer<char> workspace_;
};

bool Calls::start(const Attributes& attributes, std::vector<Input> inputs, void* unread,
                  int outputs) {
    std::string owner;
    const auto holds = attributes.find("holds");
    if (holds != attributes.end()) std::istringstream(holds->second) >> owner;
    held_ = ece408::held().find(owner);
    std::vector<Shape> in;
    for (const Input& each : inputs) in.push_back(each.shape);
    in.push_back({1});
    results_.resize(outputs);
    const auto* const op = ece408::operator_named(ece408::kSequence);
    if (!held_ || op->infer_shape(attributes, &in, &results_) != MX_SUCCESS) return false;
    const mxnet::ext::MXContext context("cpu", 0);
    run_ = ece408::make_operator(*op, attributes, context, in);
    if (!run_) return false;
    const auto bytes = static_cast<ece408::SequenceOperator*>(run_.get())->workspace_bytes();
    if (bytes > kMostBytes) return false;
    workspace_ = ece408::Buffer<char>(static_cast<int64_t>(bytes));
    for (const Shape& shape : in) in_.push_back(ece408::tensor(shape, context));
    for (const Shape& shape : results_) out_.push_back(ece408::tensor(shape, context));
    inputs_ = std::move(inputs);
    for (const Input& each : inputs_)
        if (!each.is_data()) places_.push_back(ece408::places_of(each.parameter));
    unread_ = unread;
    return workspace_ != nullptr;
}

int Calls::call(void* const* data, void* const* held, void** results) {
    if (!is_usual(data) || !are_there(data)) return 0;
    // OpenMP would start more threads for this one, beside those of MXNet's threads.
    const OwnWorkers workers;
    const auto arrays = held_->arrays();
    int status = 0;
    if (!arrays || !arrays->are_current(held, mxnet_, &status)) return status == 0 ? 0 : -1;
    std::unique_ptr<Task> task(new Task{shared_from_this(), {}, {}});
    std::vector<void*> reads;
    const bool is_ready = take(data, task.get(), &reads) && make(results, task.get());
    return is_ready && push(reads, results, std::move(task)) == 0 ? 1 : -1;
}

// The current addresses of the sequence's inputs.
bool Calls::take(void* const* data, Task* task, std::vector<void*>* reads) const {
    for (const ece408::ArrayPlaces& places : places_) places.fetch();
    for (const Input& input : inputs_) {
        void* const array = input.is_data() ? data[input.number] : input.parameter;
        Place place;
        // Converts from oneDNN's layouts.
        if (mxnet_.wait_to_read(array) != 0 || mxnet_.data(array, &place.data) != 0) return false;
        place.writes = ece408::writes_to(array);
        task->in.push_back(place);
        reads->push_back(array);
    }
    task->in.push_back({});  // the array that it does not read
    return true;
}

// Makes the result arrays.
bool Calls::make(void** results, Task* task) const {
    for (const Shape& shape : results_) {
        void* data = nullptr;
        if (mxnet_.create(shape.data(), static_cast<uint32_t>(shape.size()), kCpu, 0, 0,
                          mxnet::ext::kFloat32, results) != 0 ||
            mxnet_.data(*results++, &data) != 0)
            return false;
        task->out.push_back(data);
    }
    return true;
}

// Whether it runs in inference, and the data has the shapes for which the sequence was made.
bool Calls::is_usual(void* const* data) const {
    bool records = true, trains = true;
    if (mxnet_.is_recording(&records) != 0 || mxnet_.is_training(&trains) != 0 || records || trains)
        return false;
    for (const Input& input : inputs_)
        if (input.is_data() && !is_usual(input, data[input.number])) return false;
    return true;
}

bool Calls::is_usual(const Input& input, void* array) const {
    int device = 0, index = 0, storage = 0, type = -1, dimensions = 0;
    const int* sizes = nullptr;
    if (mxnet_.context(array, &device, &index) != 0 || device != kCpu || index != 0) return false;
    if (mxnet_.storage_type(array, &storage) != 0 || storage != mxnet::ext::kDefaultStorage)
        return false;
    if (mxnet_.type(array, &type) != 0 || type != mxnet::ext::kFloat32) return false;
    return mxnet_.shape(array, &dimensions, &sizes) == 0 &&
           Shape(sizes, sizes + std::max(dimensions, 0)) == input.shape;
}

// Whether the data has no pending writes and no failures: a function that reads it would then run
// at once.
bool Calls::are_there(void* const* data) const {
    using Answer = std::atomic<bool>;
    const auto answer = std::make_shared<Answer>(false);
    const auto run = [](void*, void* task) { **static_cast<std::shared_ptr<Answer>*>(task) = true; };
    const auto end = [](void* task) { delete static_cast<std::shared_ptr<Answer>*>(task); };
    std::vector<void*> reads;
    for (const Input& input : inputs_)
        if (input.is_data()) reads.push_back(data[input.number]);
    const int status = mxnet_.push(run, new std::shared_ptr<Answer>(answer), end,
                                   ece408::first_cpu(), reads.data(),
                                   static_cast<int>(reads.size()), nullptr, 0,
                                   ece408::run_at_once(), 0, "ece408_is_there");
    return status == 0 && *answer;
}

// Calls wait for each other: each writes to the array that no call reads.
int Calls::push(std::vector<void*> reads, void* const* results, std::unique_ptr<Task> task) {
    std::vector<void*> writes(results, results + results_.size());
    writes.push_back(unread_);
    const auto end = [](void* ended) { delete static_cast<Task*>(ended); };
    return mxnet_.push(run, task.release(), end, ece408::first_cpu(), reads.data(),
                       static_cast<int>(reads.size()), writes.data(),
                       static_cast<int>(writes.size()), ece408::run_at_once(), 0,
                       ece408::kSequence);
}

void Calls::run(void*, void* task) {
    const Task& given = *static_cast<const Task*>(task);
    given.calls->compute(given);
}

void Calls::compute(const Task& task) {
    for (size_t i = 0; i < in_.size(); i++)
        in_[i].data_ptr = task.in[i].data, in_[i].verID = task.in[i].writes;
    for (size_t i = 0; i < out_.size(); i++) out_[i].data_ptr = task.out[i];
    const auto workspace = [](void* memory, int) { return memory; };
    const mxnet::ext::OpResource resource(workspace, static_cast<char*>(workspace_), nullptr,
                                          nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
    // MXNet raises it at the wait for the results.
    if (run_->Forward(&in_, &out_, resource) != MX_SUCCESS)
        throw std::runtime_error("ece408_sequence failed");
}

}  // namespace

// Python's handle.
struct ece408_direct {
    std::shared_ptr<Calls> calls;
};

ece408_direct* ece408_direct_open(const ece408_mxnet* mxnet, int attributes,
                                  const char* const* texts, int inputs, const int* numbers,
                                  void* const* arrays, int outputs) {
    Attributes found;
    for (int i = 0; i < attributes; i++) found[texts[2 * i]] = texts[2 * i + 1];
    std::vector<Input> given;
    for (int i = 0; i + 1 < inputs; i++) {
        int dimensions = 0;
        const int* sizes = nullptr;
        if (mxnet->shape(arrays[i], &dimensions, &sizes) != 0 || dimensions < 1) return nullptr;
        given.push_back({numbers[i], arrays[i], {sizes, sizes + dimensions}});
    }
    const auto calls = std::make_shared<Calls>(*mxnet);
    if (inputs < 1 || !calls->start(found, std::move(given), arrays[inputs - 1], outputs))
        return nullptr;
    return new ece408_direct{calls};
}

int ece408_direct_call(ece408_direct* direct, void* const* data, void* const* held, void** results,
                       PyObject* const* lists, PyObject* const* firsts, int count) {
    if (!ece408_are_first(lists, firsts, count)) return 0;
    const auto calls = direct->calls;
    PyThreadState* const state = PyEval_SaveThread();
    const int status = calls->call(data, held, results);
    PyEval_RestoreThread(state);
    return status;
}

void ece408_direct_close(ece408_direct* direct) { delete direct; }
