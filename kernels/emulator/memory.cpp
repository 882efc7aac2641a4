#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ece408_emulator {
namespace {

constexpr size_t CHECKED_BYTES = size_t{1} << 30, UNCHECKED_BYTES = size_t{8} << 30;
constexpr size_t ALIGNMENT = 256;  // like cudaMalloc
// Reserved for the stacks of one core's threads and the tags of memory.
constexpr size_t SPARED = size_t{288} << 20;
constexpr int MOST_SPARED = 4;
// The allocation unit of Shadow.
constexpr size_t CHUNK = 2 << 20;

size_t rounded(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

}  // namespace

void no_memory(size_t bytes) {
    fprintf(stderr, "the emulator has no room for %zu bytes\n", bytes);
    abort();
}

void* pages(size_t bytes) {
    void* const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
}

void Memory::make(bool checked, int cores) {
    if (base_) {
        if (checked && !states_) watch();
        return;
    }
    size_t bytes = checked ? CHECKED_BYTES : UNCHECKED_BYTES;
    // A process may have a limit on its address space.
    const size_t others = std::min(std::max(cores, 1), MOST_SPARED) * SPARED;
    for (; bytes >= 1 << 20; bytes /= 2) {
        void* const spared = pages(others);
        if (!spared) break;
        base_ = static_cast<char*>(pages(bytes));
        size_ = bytes;
        const bool fits = base_ && (!checked || watch());
        munmap(spared, others);
        if (fits) break;
        if (base_) munmap(base_, bytes);
        base_ = nullptr, size_ = 0;
    }
    if (!base_) no_memory(others + bytes);
    end_ = GAP;
}

bool Memory::watch() {
    std::lock_guard<std::mutex> hold(lock_);
    states_ = static_cast<uint8_t*>(pages(size_));
    if (!states_) return false;
    if (!touched.make(size_)) {
        munmap(states_, size_);
        states_ = nullptr;
        return false;
    }
    // Their state is unknown: kernels without checks may have written them.
    for (const auto& [begin, each] : allocations_)
        memset(states_ + begin, each.freed ? FREED : WRITTEN, each.bytes);
    return true;
}

void* Memory::allocate(size_t bytes, size_t gap) {
    std::lock_guard<std::mutex> hold(lock_);
    const size_t room = rounded(bytes ? bytes : 1);
    size_t begin = end_;
    if (size_ && room <= size_ - GAP && begin <= size_ - GAP - room) {
        end_ = begin + room + gap;
    } else {
        // All addresses have been used once: reuse those of a large enough freed allocation.
        auto found = allocations_.begin();
        while (found != allocations_.end() &&
               !(found->second.freed && rounded(found->second.bytes) >= room))
            ++found;
        if (found == allocations_.end()) return nullptr;
        begin = found->first;
        if (checked()) {
            memset(states_ + begin, NO_MEMORY, rounded(found->second.bytes));
            touched.clear(begin, room);
        }
    }
    allocations_[begin] = {bytes, false};
    taken_ += room;
    if (checked()) memset(states_ + begin, NEVER_WRITTEN, bytes);
    return base_ + begin;
}

bool Memory::free(void* address) {
    std::lock_guard<std::mutex> hold(lock_);
    const auto found = allocations_.find(offset(address));
    if (found == allocations_.end() || found->second.freed) return false;
    found->second.freed = true;
    taken_ -= rounded(found->second.bytes);
    if (checked()) memset(states_ + found->first, FREED, found->second.bytes);
    return true;
}

void Memory::set_managed(void* address) {
    std::lock_guard<std::mutex> hold(lock_);
    allocations_[offset(address)].managed = true;
}

void Memory::set_written(const void* address, size_t bytes) {
    if (checked() && holds(address, bytes)) memset(states_ + offset(address), WRITTEN, bytes);
}

bool Memory::is_allocated(const void* address, size_t bytes) const {
    std::lock_guard<std::mutex> hold(lock_);
    const size_t at = offset(address);
    auto next = allocations_.upper_bound(at);
    if (next == allocations_.begin()) return false;
    --next;
    return !next->second.freed && at - next->first <= next->second.bytes &&
           bytes <= next->second.bytes - (at - next->first);
}

const Memory::Allocation* Memory::nearest(const void* address, size_t* begin) const {
    std::lock_guard<std::mutex> hold(lock_);
    const size_t at = offset(address);
    const auto next = allocations_.upper_bound(at);
    auto found = next;
    if (next != allocations_.begin()) {
        const auto before = std::prev(next);
        const size_t end = before->first + before->second.bytes;
        if (next == allocations_.end() || at < end || at - end < next->first - at) found = before;
    }
    if (found == allocations_.end()) return nullptr;
    *begin = found->first;
    return &found->second;
}

bool Shadow::make(size_t bytes) {
    pages_ = bytes / PAGE;
    table_ = static_cast<std::atomic<uintptr_t>*>(pages(pages_ * sizeof *table_));
    return table_ != nullptr;
}

char* Shadow::take(size_t bytes) {
    if (left_ < bytes) {
        auto* const made = static_cast<char*>(pages(CHUNK));
        if (!made) no_memory(CHUNK);
        chunks_.emplace_back(made, CHUNK);
        left_ = CHUNK;
    }
    left_ -= bytes;
    return chunks_.back().first + left_;
}

uintptr_t Shadow::make_page(size_t number, bool bytes) {
    std::lock_guard<std::mutex> hold(lock_);
    const uintptr_t before = table_[number];
    if (before && (before & BYTES || !bytes)) return before;
    const size_t each = bytes ? 1 : 4;
    char* const made = take(PAGE / each * sizeof(Touched));
    uintptr_t page = reinterpret_cast<uintptr_t>(made);
    if (before)
        for (size_t i = 0; i < PAGE; ++i)
            memcpy(made + i * sizeof(Touched), reinterpret_cast<Touched*>(before) + i / 4, sizeof(Touched));
    if (bytes) page |= BYTES;
    table_[number].store(page, std::memory_order_release);
    return page;
}

void Shadow::clear(size_t begin, size_t bytes) {
    visit(begin, bytes, [](Touched& each) { memset(static_cast<void*>(&each), 0, sizeof each); });
}

void Shadow::forget() {
    // Fresh pages are zeros.
    for (const auto& [begin, bytes] : chunks_) madvise(begin, bytes, MADV_DONTNEED);
}

}  // namespace ece408_emulator
