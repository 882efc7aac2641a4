// The kernel of a call and its number of threads, chosen by Python once, until settings change; and
// the call's duration, which Python gets while op times are collected.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "callbacks.h"
#include "launches.h"
#include "python_calls.h"

namespace ece408 {

// One layer, as described by its node's attribute, in one direction, for data of one type and size.
struct Call {
    std::string layer;  // and, on a line of its own, its name
    int type = 0;
    int direction = ECE408_FORWARD;
    std::array<int64_t, 4> sizes{};  // batch, channels, height, width
    int gpu = ECE408_ON_CPU;

    const char* name() const { return layer.empty() ? nullptr : layer.c_str(); }
    // Layers that differ in name only have one plan: each new net of Gluon's has new names.
    bool operator<(const Call& other) const { return key() < other.key(); }

private:
    using Sizes = std::array<int64_t, 4>;

    std::tuple<const Sizes&, int, int, int, std::string_view> key() const {
        const std::string_view all = layer;
        return {sizes, type, direction, gpu, all.substr(0, all.find('\n'))};
    }
};

struct Plan : ece408_plan {
    Plan() : ece408_plan{} {}

    std::vector<Launch> launches;
};

constexpr size_t kMostPlans = 4096;
// The settings that select kernels; a change of any invalidates all plans.
constexpr const char* kVariables[] = {"ECE408_BACKEND",   "ECE408_GRADIENT_PRECISION",
                                      "ECE408_ISA",       "ECE408_KERNEL",
                                      "ECE408_PRECISION", "ECE408_THREADS"};

class Plans {
public:
    void use(ece408_ask* ask, ece408_compute* compute, ece408_report* report,
             const ece408_others& others, const char* key) {
        ask_ = ask;
        compute_ = compute;
        report_ = report;
        others_ = others;
        key_ = key;
    }

    // Whether this process made the node; nodes from files are refused.
    bool made(const std::string& key) const { return !key_.empty() && key == key_; }

    void forget() {
        const std::lock_guard<std::mutex> lock(mutex_);
        plans_.clear();
        ++generation_;
    }

    // A number that changes with the settings; plans are valid while it stays the same.
    uint64_t generation() {
        const std::lock_guard<std::mutex> lock(mutex_);
        watch_environment();
        return generation_;
    }

    std::shared_ptr<const Plan> plan(const Call& call) {
        uint64_t generation;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            watch_environment();
            const auto found = plans_.find(call);
            if (found != plans_.end()) return found->second;
            generation = generation_;
        }
        const auto answer = std::make_shared<Plan>();
        run_python([&] {
            ask_(call.name(), call.direction, call.gpu, call.type, call.sizes.data(),
                 answer.get());
            return 1;
        });
        // A plan that could not be made has none.
        if (answer->threads < 1) answer->threads = 1;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (plans_.size() >= kMostPlans) plans_.clear();
        if (generation == generation_) plans_[call] = answer;
        return answer;
    }

    // The functions of the kernels' library.
    const ece408_others& others() const { return others_; }

    // Threads for work other than convolutions.
    int threads() { return plan({})->threads; }

    bool compute(const Call& call, void* const* arrays) {
        return run_python([&] {
            return compute_(call.name(), call.direction, call.gpu, call.type, call.sizes.data(),
                            arrays);
        }) != 0;
    }

    void log(bool is_open) { log_is_open_ = is_open; }

    bool logs() const { return log_is_open_; }

    // Reports the duration of a call by a plan to Python, if op times are collected; false if that
    // failed.
    bool report(const Call& call, const Plan& plan, const Times& times) {
        return !log_is_open_ || run_python([&] {
            return report_(call.name(), call.direction, call.gpu, call.type, call.sizes.data(),
                           &plan, times.all, times.gpu);
        }) != 0;
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
    std::map<Call, std::shared_ptr<const Plan>> plans_;
    std::array<std::string, std::size(kVariables)> environment_;
    uint64_t generation_ = 0;
    std::atomic<bool> log_is_open_{false};
    ece408_ask* ask_ = nullptr;
    ece408_compute* compute_ = nullptr;
    ece408_report* report_ = nullptr;
    ece408_others others_{};
    std::string key_;
};

// The plans of the library. Never destroyed: MXNet's threads may still be running when the process
// ends.
inline Plans& plans() {
    static Plans* const all = new Plans;
    return *all;
}

}  // namespace ece408
