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

// What calls with one plan have in common. Layers that differ in name only have one plan: each new
// net of Gluon's has new names.
inline auto key_of(const ece408_call& call) {
    const std::string_view all = call.layer ? call.layer : "";
    const auto& [batch, channels, height, width] = call.sizes;
    return std::tuple(batch, channels, height, width, call.type, call.direction, call.gpu,
                      std::string(all.substr(0, all.find('\n'))));
}

struct Plan : ece408_plan {
    std::vector<Launch> launches;
};

constexpr size_t kMostPlans = 4096;
// The settings that select kernels; a change of any invalidates all plans.
constexpr const char* kVariables[] = {"ECE408_BACKEND",   "ECE408_GRADIENT_PRECISION",
                                      "ECE408_ISA",       "ECE408_KERNEL",
                                      "ECE408_PRECISION", "ECE408_THREADS"};

class Plans {
public:
    void use(const ece408_forward_functions& functions, const char* key) {
        functions_ = functions;
        key_ = key;
    }

    const ece408_forward_functions& functions() const { return functions_; }

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

    std::shared_ptr<const Plan> plan(const ece408_call& call) {
        const auto key = key_of(call);
        uint64_t generation;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            watch_environment();
            const auto found = plans_.find(key);
            if (found != plans_.end()) return found->second;
            generation = generation_;
        }
        const auto answer = std::make_shared<Plan>();
        run_python([&] { return functions_.ask(&call, answer.get()); });
        // A plan that could not be made has none.
        if (answer->threads < 1) answer->threads = 1;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (plans_.size() >= kMostPlans) plans_.clear();
        if (generation == generation_) plans_[key] = answer;
        return answer;
    }

    // Threads for work other than convolutions.
    int threads() { return plan({})->threads; }

    bool compute(const ece408_call& call, void* const* arrays) {
        return run_python([&] { return functions_.compute(&call, arrays); }) != 0;
    }

    // Reports the duration of a call by a plan to Python, if it has one and op times are collected;
    // false if that failed.
    bool report(const ece408_call& call, const Plan& plan, const Times& times) {
        return !logs || times.all == 0 || run_python([&] {
            return functions_.report(&call, &plan, times.all, times.gpu);
        }) != 0;
    }

    // Whether op times are collected.
    std::atomic<bool> logs{false};

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
    std::map<decltype(key_of({})), std::shared_ptr<const Plan>> plans_;
    std::array<std::string, std::size(kVariables)> environment_;
    uint64_t generation_ = 0;
    ece408_forward_functions functions_{};
    std::string key_;
};

// The plans of the library. Never destroyed: MXNet's threads may still be running when the process
// ends.
inline Plans& plans() {
    static Plans* const all = new Plans;
    return *all;
}

}  // namespace ece408
