// Memory of the emulated GPU, and what is known of each byte and word of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace ece408_emulator {

// Of a byte.
enum State : uint8_t { NO_MEMORY, NEVER_WRITTEN, WRITTEN, FREED };

// Who touched a word: launch (8 bits), block (20), thread (12), and the thread's clock (24).
using Tag = uint64_t;
constexpr unsigned CLOCK_BITS = 24, THREAD_BITS = 12, BLOCK_BITS = 20;
constexpr uint32_t CLOCKS = 1u << CLOCK_BITS, BLOCKS = 1u << BLOCK_BITS;
constexpr uint32_t MANY_BLOCKS = BLOCKS - 1;
// In a thread's place: several of a block, or one by an atomic function.
constexpr uint32_t MANY_THREADS = 0xFFF, BY_ATOMIC = 0xFFE;

constexpr Tag tag(uint32_t launch, uint32_t block, uint32_t thread, uint32_t clock) {
    return Tag{launch & 0xFF} << 56 | Tag{block & (BLOCKS - 1)} << 36 | Tag{thread} << 24 |
           (clock & (CLOCKS - 1));
}
constexpr uint32_t launch_of(Tag t) { return t >> 56; }
constexpr uint32_t block_of(Tag t) { return t >> 36 & (BLOCKS - 1); }
constexpr uint32_t thread_of(Tag t) { return t >> 24 & 0xFFF; }
constexpr uint32_t clock_of(Tag t) { return t & (CLOCKS - 1); }

// Plain loads and stores, though other cores may touch it.
struct Word {
    std::atomic<Tag> value;
    operator Tag() const { return value.load(std::memory_order_relaxed); }
    Word& operator=(Tag t) {
        value.store(t, std::memory_order_relaxed);
        return *this;
    }
};

// The last that wrote and the last that read a word. Blocks on other cores change them, too.
struct Touched {
    Word written, read;
};

// The GPU's memory: one range of addresses, in which allocations lie with gaps between.
class Memory {
public:
    // With `checked` there is a state for each byte, and a Touched for each word of 4.
    void make(bool checked);
    // Null where there is no room.
    void* allocate(size_t bytes);
    // False for what is no allocation's first address.
    bool free(void* address);
    void set_written(const void* address, size_t bytes);
    bool holds(const void* address, size_t bytes) const {
        return offset(address) < size_ && bytes <= size_ - offset(address);
    }
    // Whether all of these bytes are one allocation's.
    bool is_allocated(const void* address, size_t bytes) const;
    void forget_touches();

    size_t offset(const void* address) const {
        return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_);
    }
    bool checked() const { return states_ != nullptr; }
    uint8_t* states(size_t offset) const { return states_ + offset; }
    Touched& touched(size_t offset) const { return touched_[offset / 4]; }
    size_t size() const { return size_; }
    size_t free_bytes() const { return size_ - taken_; }

    struct Allocation {
        size_t bytes;
        bool freed;
    };
    // The allocation that is the nearest to an address, and its offset; null if there is none.
    const Allocation* nearest(const void* address, size_t* begin) const;

private:
    // Have states from now on. False where there are no addresses for them.
    bool watch();

    char* base_ = nullptr;
    uint8_t* states_ = nullptr;
    Touched* touched_ = nullptr;
    size_t size_ = 0, end_ = 0, taken_ = 0;
    std::map<size_t, Allocation> allocations_;
    mutable std::mutex lock_;
};

// Memory of zeros that takes room only where it is touched; null where there are no addresses.
void* pages(size_t bytes);

}  // namespace ece408_emulator
