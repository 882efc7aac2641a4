// What outlives the operators that use it: MXNet may make a hybridized block's operators anew for every
// call.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace ece408 {

template <class Owned>
class Owners {
public:
    // From now on `owner` has this, or room for one.
    void own(const std::string& owner, std::shared_ptr<Owned> owned = nullptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        owned_[owner] = std::move(owned);
    }

    void release(const std::string& owner) {
        std::shared_ptr<Owned> last;  // ended without the lock, which Python may wait for
        const std::lock_guard<std::mutex> lock(mutex_);
        last.swap(owned_[owner]);
        owned_.erase(owner);
    }

    // The owner's, or null if it has none yet.
    std::shared_ptr<Owned> find(const std::string& owner) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = owned_.find(owner);
        return found == owned_.end() ? nullptr : found->second;
    }

    // The owner's from now on: this one, unless another came first. One without an owner is its node's.
    std::shared_ptr<Owned> keep(const std::string& owner, std::shared_ptr<Owned> owned) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = owned_.find(owner);
        if (found == owned_.end()) return owned;
        if (!found->second) found->second = owned;
        return found->second;
    }

private:
    std::mutex mutex_;
    std::map<std::string, std::shared_ptr<Owned>> owned_;
};

}  // namespace ece408
