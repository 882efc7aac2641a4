// Objects that outlive the operators that use them: MXNet may make a hybridized block's operators
// again for every call.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace ece408 {

template <class Owned>
class Owners {
public:
    // Sets or reserves the object of `owner`.
    void own(const std::string& owner, std::shared_ptr<Owned> owned = nullptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        owned_[owner] = std::move(owned);
    }

    void release(const std::string& owner) {
        std::shared_ptr<Owned> last;  // destroyed without the lock, which Python may wait for
        const std::lock_guard<std::mutex> lock(mutex_);
        last.swap(owned_[owner]);
        owned_.erase(owner);
    }

    // The owner's object, or null if it has none yet.
    std::shared_ptr<Owned> find(const std::string& owner) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = owned_.find(owner);
        return found == owned_.end() ? nullptr : found->second;
    }

    // The owner's object from now on: this one, unless another came first. Without an owner it
    // belongs to its node.
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
