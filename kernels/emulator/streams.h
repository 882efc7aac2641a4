// Happens-before order of the GPU's work: vector clocks of streams, events and the host (CUDA C++
// Programming Guide, "Streams", "Events", "Implicit Synchronization"). The emulator runs each
// operation when it is enqueued; the clocks tell whether a GPU might run two in another order.
#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <utility>
#include <vector>

#include "include/emulated.h"

namespace ece408_emulator {

// For each stream, the number of its operations that have finished.
using Clock = std::vector<uint32_t>;

// The caller holds `Emulator::running`, unless a comment says otherwise.
class Streams {
public:
    // Operations are numbered by one byte; 0 means none.
    static constexpr uint32_t OPERATIONS = 256;

    Streams();
    cudaStream_t create(bool is_blocking);
    bool destroy(cudaStream_t stream);
    bool has(cudaStream_t stream) const;
    // Whether there have been two streams whose work may overlap.
    bool are_several() const { return are_several_; }

    // Operation `number` begins; the library at this address enqueued it. Returns a flag for each
    // operation that may overlap with it, or null if none may.
    const std::atomic<uint8_t>* begin(cudaStream_t stream, uint32_t number, uintptr_t library);
    uintptr_t library(uint32_t number) const { return operations_[number].library; }
    // Frees all numbers.
    void forget();

    // The clock of an event that is recorded now.
    Clock recorded(cudaStream_t stream) { return reached(index_of(stream)); }
    void wait(cudaStream_t stream, const Clock& event) { join(streams_[index_of(stream)].clock, event); }
    void host_waits(const Clock& event);
    void host_waits_for_all();

    // An asynchronous copy of host memory, which the host must not touch before it has finished.
    // `too_early` returns an unfinished copy that an access of the host conflicts with, or null.
    struct HostCopy {
        uintptr_t begin, end;
        bool writes;
        const void* place;
        size_t stream;
        uint32_t count;
    };
    void copies_host(cudaStream_t stream, HostCopy copy);
    const HostCopy* too_early(uintptr_t begin, uintptr_t end, bool writes) const;
    // Any thread may call it.
    bool copies_host() const { return copies_host_.load(std::memory_order_relaxed); }

    // A number that stands for two overlapping operations, or the second's own if no number is free.
    // One thread at a time calls it.
    uint32_t both(uint32_t before, uint32_t own, uint32_t (*next)());
    bool includes(uint32_t number, uint32_t other) const { return operations_[number].all[other]; }

private:
    struct Stream {
        bool is_there, is_blocking;
        Clock clock;
    };
    struct Operation {
        size_t stream;
        uint32_t count;
        uintptr_t library;
        // The operations that the number stands for.
        std::bitset<OPERATIONS> all;
    };

    static size_t index_of(cudaStream_t stream);
    static void join(Clock& to, const Clock& from);
    // The work that is complete before the stream's next operation begins.
    Clock& reached(size_t index);

    // The legacy default stream, that of a thread, and those that were created.
    std::vector<Stream> streams_;
    Clock host_;
    std::vector<HostCopy> host_copies_;
    std::atomic<bool> copies_host_{false};
    bool are_several_ = false;
    Operation operations_[OPERATIONS] = {};
    std::atomic<uint8_t> unordered_[OPERATIONS] = {};
    uint32_t last_before_ = 0, last_own_ = 0, last_both_ = 0;
};

}  // namespace ece408_emulator
