// Memory of the emulated GPU, and the state of each byte and word.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace ece408_emulator {

// Of a byte; COMING: a copy to it has started without a wait.
enum State : uint8_t { NO_MEMORY, NEVER_WRITTEN, WRITTEN, FREED, COMING };

// The accessor of a word: launch (8 bits), block (20), thread (12), and the thread's clock (24).
using Tag = uint64_t;
constexpr unsigned CLOCK_BITS = 24, THREAD_BITS = 12, BLOCK_BITS = 20;
constexpr uint32_t CLOCKS = 1u << CLOCK_BITS, BLOCKS = 1u << BLOCK_BITS;
constexpr uint32_t MANY_BLOCKS = BLOCKS - 1;
constexpr unsigned LAUNCH_AT = CLOCK_BITS + THREAD_BITS + BLOCK_BITS;
// Instead of a thread: several threads of a block, or one by an atomic function.
constexpr uint32_t MANY_THREADS = 0xFFF, BY_ATOMIC = 0xFFE;
// Plus the warp's number: several lanes of one warp.
constexpr uint32_t SOME_LANES = 0x800;

constexpr Tag tag(uint32_t launch, uint32_t block, uint32_t thread, uint32_t clock) {
    return Tag{launch & 0xFF} << LAUNCH_AT | Tag{block & (BLOCKS - 1)} << 36 | Tag{thread} << 24 |
           (clock & (CLOCKS - 1));
}
constexpr uint32_t launch_of(Tag t) { return t >> LAUNCH_AT; }
constexpr uint32_t block_of(Tag t) { return t >> 36 & (BLOCKS - 1); }
constexpr uint32_t thread_of(Tag t) { return t >> 24 & 0xFFF; }
constexpr uint32_t clock_of(Tag t) { return t & (CLOCKS - 1); }

// Plain loads and stores, although other cores may access it.
struct Word {
    std::atomic<Tag> value;
    operator Tag() const { return value.load(std::memory_order_relaxed); }
    Word& operator=(Tag t) {
        value.store(t, std::memory_order_relaxed);
        return *this;
    }
};

// The last writer and the last reader of a unit of memory, a word or a byte, and their places.
// Blocks on other cores change them, too.
struct alignas(32) Touched {
    Word written, read;
    // The readers' lanes, if they are in one warp.
    std::atomic<uint32_t> lanes;
    // Places by the numbers of `where_id`.
    std::atomic<uint32_t> written_at, read_at;
    // Whether the last writer has written different values since others could have written.
    std::atomic<uint32_t> varied;
};

// The tags of a range of addresses, allocated on the first access: one for each word of 4 bytes, or
// for each byte in pages with accesses to smaller parts.
class Shadow {
public:
    static constexpr size_t PAGE = 4096;
    // False if the address space is exhausted.
    bool make(size_t bytes);
    explicit operator bool() const { return table_ != nullptr; }
    void forget();
    // Clears bytes that become another allocation's.
    void clear(size_t begin, size_t bytes);

    // Calls `each` with every unit of the bytes at an offset.
    template <class Each>
    [[gnu::always_inline]] void visit(size_t at, size_t size, const Each& each) {
        const uintptr_t page = table_[at / PAGE].load(std::memory_order_acquire);
        const bool is_plain = page && !(page & BYTES) && !((at | size) & 3) && at % PAGE + size <= PAGE;
        if (!__builtin_expect(is_plain, true)) return visit_any(at, size, each);
        Touched* const units = reinterpret_cast<Touched*>(page) + at % PAGE / 4;
        for (size_t i = 0; i < size / 4; ++i) each(units[i]);
    }

private:
    static constexpr uintptr_t BYTES = 1;
    template <class Each>
    [[gnu::noinline]] void visit_any(size_t at, size_t size, const Each& each) {
        const bool has_parts = (at | size) & 3;
        for (const size_t end = at + size; at < end;) {
            uintptr_t page = table_[at / PAGE].load(std::memory_order_acquire);
            if (!page || (has_parts && !(page & BYTES))) page = make_page(at / PAGE, has_parts);
            const size_t next = (at | (PAGE - 1)) + 1, stop = end < next ? end : next;
            const size_t step = page & BYTES ? 1 : 4;
            Touched* const units = reinterpret_cast<Touched*>(page & ~BYTES);
            for (; at < stop; at += step) each(units[at % PAGE / step]);
        }
    }
    uintptr_t make_page(size_t number, bool bytes);
    char* take(size_t bytes);

    // By page: its units, and BYTES if they are bytes.
    std::atomic<uintptr_t>* table_ = nullptr;
    size_t pages_ = 0;
    std::mutex lock_;
    std::vector<std::pair<char*, size_t>> chunks_;
    size_t left_ = 0;
};

// Zeroed memory that the system allocates on the first access; null if the address space is
// exhausted.
void* pages(size_t bytes);
// Ends the process for lack of this many bytes. lab/check.py looks for the printed words.
[[noreturn]] void no_memory(size_t bytes);

// The GPU's memory: one range of addresses, with gaps between allocations.
class Memory {
public:
    // With `checked`, each byte has a state and tags. Leaves room for the stacks of `cores` cores.
    void make(bool checked, int cores);
    // Null without room. `gap` bytes after the allocation stay unused.
    void* allocate(size_t bytes, size_t gap = GAP);
    // False unless it is an allocation's first address.
    bool free(void* address);
    void set_managed(void* address);
    void set_written(const void* address, size_t bytes);
    bool holds(const void* address, size_t bytes) const {
        return offset(address) < size_ && bytes <= size_ - offset(address);
    }
    // Whether all of these bytes are in one allocation.
    bool is_allocated(const void* address, size_t bytes) const;

    size_t offset(const void* address) const {
        return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(base_);
    }
    bool checked() const { return states_ != nullptr; }
    uint8_t* states(size_t offset) const { return states_ + offset; }
    size_t size() const { return size_; }
    size_t free_bytes() const { return size_ - taken_; }

    Shadow touched;

    struct Allocation {
        size_t bytes;
        bool freed;
        // The host may access it, too.
        bool managed = false;
    };
    // The allocation nearest to an address, and its offset; null without allocations.
    const Allocation* nearest(const void* address, size_t* begin) const;

private:
    // Gap between allocations, so that an index that is off by a row does not reach the next one.
    static constexpr size_t GAP = 64 << 10;
    // Starts to track states. False if the address space is exhausted.
    bool watch();

    char* base_ = nullptr;
    uint8_t* states_ = nullptr;
    size_t size_ = 0, end_ = 0, taken_ = 0;
    std::map<size_t, Allocation> allocations_;
    mutable std::mutex lock_;
};

}  // namespace ece408_emulator
