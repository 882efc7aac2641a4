// Memory that is freed at the end of its scope.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace ece408 {
namespace {

// Memory for `count` elements, aligned to a cache line; a null pointer if it could not be
// allocated.
template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(int64_t count) {
        constexpr size_t kLineBytes = 64;
        // One byte more, so that no elements do not give a null pointer.
        const size_t bytes = static_cast<size_t>(count) * sizeof(T) + 1;
        first_ = static_cast<T*>(
            aligned_alloc(kLineBytes, (bytes + kLineBytes - 1) / kLineBytes * kLineBytes));
    }
    Buffer(Buffer&& other) : first_(other.first_) { other.first_ = nullptr; }
    Buffer& operator=(Buffer&& other) {
        T* const own = first_;
        first_ = other.first_;
        other.first_ = own;
        return *this;
    }
    ~Buffer() { free(first_); }

    operator T*() const { return first_; }

private:
    T* first_ = nullptr;
};

}  // namespace
}  // namespace ece408
