// What of the GPU's work comes before what, as streams, events and the host's waiting say (CUDA C++
// Programming Guide, "Streams", "Events", "Implicit Synchronization"). All work is done at once here:
// this tells whether a GPU might have done it in another order.
#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <utility>
#include <vector>

#include "include/emulated.h"

namespace ece408_emulator {

// By stream: so many of its operations are over.
using Clock = std::vector<uint32_t>;

// Who calls holds `Emulator::running`, unless told otherwise.
class Streams {
public:
    // Operations have numbers of one byte; 0 is none's.
    static constexpr uint32_t OPERATIONS = 256;

    Streams();
    cudaStream_t create(bool is_blocking);
    bool destroy(cudaStream_t stream);
    bool has(cudaStream_t stream) const;
    // Whether there have been streams of which one's work may run beside another's.
    bool are_several() const { return are_several_; }

    // An operation of this number begins, called by a library that is loaded at an address. Returns,
    // by number, those that it may run beside; null if there are none.
    const std::atomic<uint8_t>* begin(cudaStream_t stream, uint32_t number, uintptr_t library);
    uintptr_t library(uint32_t number) const { return operations_[number].library; }
    // No number is in use any more.
    void forget();

    // What an event says that is recorded now.
    Clock recorded(cudaStream_t stream) { return reached(index_of(stream)); }
    void wait(cudaStream_t stream, const Clock& event) { join(streams_[index_of(stream)].clock, event); }
    void host_waits(const Clock& event);
    void host_waits_for_all();

    // A copy that begins now and reads or writes the host's memory, which is not to be touched before it
    // is over. Of those that the host has not waited for, the one that an access is too early for; null
    // if there is none.
    struct HostCopy {
        uintptr_t begin, end;
        bool writes;
        const void* place;
        size_t stream;
        uint32_t count;
    };
    void copies_host(cudaStream_t stream, HostCopy copy);
    const HostCopy* too_early(uintptr_t begin, uintptr_t end, bool writes) const;
    // Of any thread.
    bool copies_host() const { return copies_host_.load(std::memory_order_relaxed); }

    // A number for both of two operations, of which the second runs and may run beside the first; the
    // second if there is none left. Of several threads one calls at a time.
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
        // Itself, or those that it stands for.
        std::bitset<OPERATIONS> all;
    };

    static size_t index_of(cudaStream_t stream);
    static void join(Clock& to, const Clock& from);
    // What is over before the stream's next operation begins.
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
