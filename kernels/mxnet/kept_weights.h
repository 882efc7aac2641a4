// A layer's packed weights, and the factors and addends of its epilogue, kept between calls until
// they change.
#pragma once

#include <mxnet/lib_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "array_versions.h"
#include "epilogue.h"
#include "owners.h"
#include "plans.h"

namespace ece408 {

class KeptWeights {
public:
    // Whether arrays may be in memory with writes that MXNet does not count.
    static inline std::atomic<bool> are_shared{false};

    // For a call by `plan`, whose function is forward_f32; null if its kernel reads weights in
    // place, or cannot take these. `bias` may be null.
    std::shared_ptr<const float> packed(const ece408_problem& problem, const Plan& plan,
                                        const mxnet::ext::MXTensor& weights,
                                        const mxnet::ext::MXTensor* bias) {
        if (!keeps()) return nullptr;
        const std::lock_guard<std::mutex> lock(mutex_);
        const uint64_t of_weights = versions_.of(0, weights);
        const uint64_t of_bias = bias ? versions_.of(1, *bias) : 0;
        if (of_weights == of_weights_ && of_bias == of_bias_ && plan.isa == isa_ &&
            plan.kernel == kernel_ && is_same_layer(problem))
            return packed_;
        problem_ = problem, isa_ = plan.isa, kernel_ = plan.kernel;
        of_weights_ = of_weights, of_bias_ = of_bias;
        return packed_ = pack(plan, weights.data_ptr, bias ? bias->data_ptr : nullptr);
    }

    // Of `filters` filters, from gamma, beta, mean and variance, four arrays from `parameters` on.
    std::shared_ptr<const Affine> affine(const Epilogue& epilogue, int64_t filters,
                                         const mxnet::ext::MXTensor* parameters) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::array<uint64_t, 4> versions{};
        const float* arrays[4] = {};
        for (size_t i = 0; i < 4; i++) {
            versions[i] = !keeps() ? ArrayVersions::next() : versions_.of(2 + i, parameters[i]);
            arrays[i] = static_cast<const float*>(parameters[i].data_ptr);
        }
        if (!affine_ || versions != of_affine_)
            affine_ = std::make_shared<Affine>(::affine(epilogue, filters, arrays));
        of_affine_ = versions;
        return affine_;
    }

    bool keeps() const { return keeps_ && !are_shared; }

    // Discards everything that was made from weights, and sets whether to keep it from now on. Call
    // it before other arrays replace these: they may have the same addresses and counts of writes.
    void forget(bool keeps) {
        const std::lock_guard<std::mutex> lock(mutex_);
        keeps_ = keeps;
        of_weights_ = of_bias_ = 0;
        of_affine_ = {};
    }

private:
    bool is_same_layer(ece408_problem problem) const {
        problem.batch = problem_.batch;
        return std::memcmp(&problem, &problem_, sizeof problem) == 0;
    }

    std::shared_ptr<const float> pack(const Plan& plan, const void* weights,
                                      const void* bias) const {
        constexpr size_t kLine = 64;
        const int64_t floats = plans().others().packed_floats(&problem_, plan.isa, plan.kernel);
        if (floats == 0) return nullptr;
        const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + kLine - 1) / kLine * kLine;
        const std::shared_ptr<float> made(static_cast<float*>(std::aligned_alloc(kLine, bytes)),
                                          std::free);
        if (!made) return nullptr;
        const int status = plans().others().pack(
            &problem_, static_cast<const float*>(weights), static_cast<const float*>(bias),
            made.get(), plan.threads, plan.isa, plan.kernel);
        return status == ECE408_OK ? made : nullptr;
    }

    std::mutex mutex_;
    std::atomic<bool> keeps_{true};
    ArrayVersions versions_{6};  // of weights, bias, and the parameters of the affine
    ece408_problem problem_{};
    int isa_ = 0, kernel_ = 0;
    uint64_t of_weights_ = 0, of_bias_ = 0;
    std::shared_ptr<const float> packed_;
    std::array<uint64_t, 4> of_affine_{};
    std::shared_ptr<const Affine> affine_;
};

// The packed weights of all nodes.
Owners<KeptWeights>& kept_weights();

}  // namespace ece408
