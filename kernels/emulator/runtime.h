// Running blocks and threads of the emulated GPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "counts.h"
#include "include/emulated.h"
#include "memory.h"
#include "streams.h"

namespace ece408_emulator {

constexpr uint32_t LANES = 32;
// Shared memory of a block: CUDA's maximum, and gaps between the variables.
constexpr size_t SHARED_REGION = 512 << 10, SHARED_GAP = 512, SHARED_ALIGNMENT = 128;
constexpr size_t LARGEST_SHARED = 227 << 10, LARGEST_STATIC_SHARED = 48 << 10;

// The number of a block's threads at a barrier, and the sum of their predicates.
struct Arrived {
    int threads, sum;
};

struct Settings {
    int cores = 1;
    bool checked = true;
    // Counts the warps' work instead, with lanes in step.
    bool counted = false;
    // Runs threads and blocks in an order from `seed`, one block after the other.
    bool random = false;
    uint64_t seed = 0;
};

// A stack for CUDA threads, one after the other unless one waits.
struct Fiber {
    char* stack = nullptr;
    void* top = nullptr;  // where it continues
};

enum class Waits : uint8_t { NOT, FOR_BLOCK, FOR_WARP, FOR_ACTIVE, ENDED, NOT_BEGUN };

// A thread's pending copies to shared memory, by the number of groups that it had committed before.
struct Copies {
    struct Copy {
        void* to;
        size_t bytes, group;
    };
    std::vector<Copy> begun;
    size_t groups = 0;
};

struct Thread {
    Waits waits;
    Fiber* fiber;
    Place place;  // where it waits
    uint32_t clock;
    // Releases and acquisitions of the block by atomic functions: the indices of this thread's last
    // ones, and its clock at its last release. It has passed a fence since.
    uint32_t released_at, acquired_at, released;
    bool fenced;
    Copies copies;
    int predicate;
    // The warp function that it is in.
    Warp what;
    unsigned mask;
    uint64_t value, result;
    int lane, width;
    // Where its code continues, and the stack depth of its calls.
    uintptr_t code;
    size_t depth;
    // The address that it reads repeatedly, the number of reads, and of yields since a time.
    const void* spun_at;
    uint64_t spun_value;
    uint32_t spun, yields;
    std::chrono::steady_clock::time_point spins_since;
};

// A running launch.
struct Running {
    const char* name;
    dim3 grid, block;
    size_t dynamic_bytes;
    void (*thread)(void*);
    void* call;
    // The addresses of the kernel's library.
    uintptr_t library_begin, library_end;
    uint32_t number;
    // The result of `Streams::begin`.
    const std::atomic<uint8_t>* unordered;
    std::atomic<uint64_t> next_block{0};
    // cudaError_t that ended it.
    std::atomic<int> error{0};
    std::atomic<size_t> shared_end{0}, static_bytes{0};
    size_t most_shared = LARGEST_STATIC_SHARED;
    std::vector<uint32_t> order;
    // By block: it has passed a fence; one of its atomic functions was seen after a fence.
    std::unique_ptr<std::atomic<uint8_t>[]> released;
    std::atomic<bool> any_released{false};
    // Workers that have not ended, and workers whose threads have all spun for long.
    std::atomic<int> workers{1}, stuck{0};
};

// An access that may be a mistake: a write over another thread's write, if it changes the value, or
// a read of an atomic function's result, unless atomicCAS follows.
struct Suspect {
    const void* address = nullptr;
    size_t size;
    Site site;
    Tag before;
    uint32_t before_at;
    bool is_shared, is_rewrite;
    unsigned char old[16];
};

// A variable of a library: its addresses.
struct Variable {
    uintptr_t begin, end;
};

// The state of one core, which runs one block after the other.
class Worker {
public:
    Worker();
    ~Worker();
    Worker(const Worker&) = delete;
    // False without room.
    bool is_ready;
    void run(Running& running);

    void wait(Waits what, Place place);
    Arrived arrive(int predicate, Place place);
    uint64_t together(Place place, Warp what, unsigned mask, uint64_t value, int lane, int width);
    void copy_values(const void* (&to)[LANES]) const;
    unsigned active_lanes(Place place);
    // Before a basic block: lets the warp's other lanes arrive, too.
    void begin_code(const void* code, const void* frame);
    // A step of a loop that waits for another thread: a volatile read of these bytes, or an atomic
    // function. If they stay the same, others run; if no thread changes them, it is a deadlock.
    void spin(const void* address, size_t bytes, Place place, const void* returns_to);
    // Ends the launch: none of its threads continues. Does not return in a CUDA thread.
    [[noreturn]] void stop(int error);

    // The tag of the current thread's accesses.
    Tag own_tag() const { return own_tag_; }
    // A word that many blocks of this launch have read.
    bool read_by_many_blocks(Tag tag) const { return tag >> (CLOCK_BITS + THREAD_BITS) == many_blocks_; }
    // Whether the tag is of an operation that may overlap with this launch.
    bool on_other_stream(Tag before) const {
        return running_->unordered && running_->unordered[launch_of(before)].load(std::memory_order_relaxed);
    }
    // Whether the tagged access comes before the current thread's next one; for a tag of
    // SOME_LANES, whether those lanes' accesses do.
    bool ordered(Tag before, uint32_t lanes) const;
    // The lanes of the current warp whose clock the current thread does not know.
    uint32_t unordered(Tag before, uint32_t lanes) const;
    // The current thread passes a fence, or an atomic function.
    void fence() { threads_[current_].fenced = true; }
    void synchronize();
    uint32_t current() const { return current_; }
    uint32_t block() const { return block_; }
    Running& running() const { return *running_; }

    bool on_stack(uintptr_t address) const { return address - stacks_begin_ < stacks_bytes_; }
    size_t shared_offset(const void* address) const {
        return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(shared_);
    }
    void* shared_at(size_t offset, size_t bytes);

    char* shared_ = nullptr;
    uint8_t* shared_states = nullptr;
    Shadow shared_touched;
    bool acquired = false;
    Copies& copies() { return threads_[current_].copies; }
    // Decided by the current thread's next access, or its end; `unsettled`: `written` is pending.
    Suspect written, read;
    bool unsettled = false;
    // Inside atomicCAS.
    bool compares = false;
    Place last_place{nullptr, 0};
    uint32_t last_place_id = 0;
    // Null unless warps are counted.
    std::unique_ptr<Counts> counts;
    // The library's last accessed variable.
    Variable variable{0, 0};

private:
    void run_block(uint32_t number);
    void run_in_step();
    bool step(uint32_t warp);
    void count_barrier();
    void end_step();
    void begin_threads();
    void go_on(Fiber* fiber);
    Fiber* idle_fiber();
    void place(uint32_t thread);
    void release_block();
    void release_active();
    void release_warp(uint32_t warp, unsigned mask);
    void answer(uint32_t warp, unsigned mask);
    void try_warp_of(uint32_t thread);
    void no_one_can_go_on();
    void forget_fibers();
    static void fiber_main();
    void run_threads();
    void yield();
    void spins_on(Place place, const void* returns_to);
    void be_stuck(bool stuck);
    unsigned existing(uint32_t warp) const;

    Running* running_ = nullptr;
    uint32_t block_ = 0, current_ = 0, count_ = 0, begun_ = 0, ended_ = 0, at_barrier_ = 0, at_active_ = 0;
    uint32_t barrier_clock_ = 0, sequence_ = 0;
    Tag own_tag_ = 0, many_blocks_ = 0;
    Arrived arrived_{};
    std::vector<Thread> threads_;
    std::vector<uint32_t> order_, ready_;
    size_t next_ready_ = 0;
    // By warp, lane and other lane: the lane's knowledge of the other's clock.
    std::vector<uint32_t> known_;
    bool warps_used_ = false;
    bool knows(uint32_t thread, uint32_t clock) const;
    // By thread: its value of the last GATHER.
    std::vector<uint64_t> gathered_;
    // The end of the largest shared memory of this worker's blocks.
    size_t shared_end_ = 0;
    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Fiber*> idle_;
    // This block's threads spin, and so do those of all other workers.
    bool stuck_ = false, all_stuck_ = false;
    Fiber* fiber_ = nullptr;
    void* scheduler_ = nullptr;
    uintptr_t stacks_begin_ = 0;
    size_t stacks_bytes_ = 0;
    std::mt19937_64 random_;
};

// The worker on this core's thread; null outside of kernels.
extern __thread Worker* worker;

// Before the worker's current thread waits, or ends.
void settle(Worker& worker);
void settle_read(Worker& worker);

// The address range of the loaded library that contains this address; 0 and 0 if none does.
std::pair<uintptr_t, uintptr_t> library_of(const void* address);

// The host's work on the GPU's memory, such as a copy, which streams may run beside other work.
class Transfer {
public:
    Transfer(cudaStream_t stream, const void* place);
    void reads(const void* address, size_t bytes) { touch(address, bytes, false); }
    void writes(const void* address, size_t bytes) { touch(address, bytes, true); }

private:
    void touch(const void* address, size_t bytes, bool writes);

    std::unique_lock<std::mutex> alone_;
    const void* place_;
    uint32_t number_ = 0, at_ = 0;
    const std::atomic<uint8_t>* unordered_ = nullptr;
};

struct Emulator {
    // For launches, one at a time.
    std::mutex running;
    Settings settings;
    Memory memory;
    // cudaError_t: of the last call, and a sticky one, such as after an illegal address.
    std::atomic<int> last{0}, sticky{0};
    // The last one is of a cudaFree(), which is harmless.
    std::atomic<bool> last_by_free{false};
    // Counts launches, and copies that streams may run beside launches.
    uint32_t operations = 0;
    Streams streams;
    // The number of the next operation. Tags have the last 8 bits only; 0 means no access. When all
    // numbers are used, all accesses are forgotten.
    uint32_t next_operation();
    // Excludes launches, unless it is called by a kernel, where only the host may call.
    std::unique_lock<std::mutex> alone() {
        return worker ? std::unique_lock<std::mutex>() : std::unique_lock<std::mutex>(running);
    }
    std::vector<std::unique_ptr<Worker>> workers;
    // The maximum for a block, by cudaFuncSetAttribute for any kernel.
    size_t most_shared = LARGEST_STATIC_SHARED;
    // The variables of all libraries, except constant ones, by address.
    std::vector<Variable> variables;
};
extern Emulator the_emulator;
inline Emulator& emulator() { return the_emulator; }

}  // namespace ece408_emulator
