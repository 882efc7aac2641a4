// Runs the blocks of a launch on the machine's cores, and each block's threads on separate stacks:
// a thread that waits for its block or its warp lets others of the block run.

#include "runtime.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <tuple>

#include "findings.h"
#include "include/errors.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

// Saves the callee-saved registers, and continues on another stack.
extern "C" void ece408_emulator_switch(void** left, void* next);
#if defined(__x86_64__)
asm(R"(
.text
.globl ece408_emulator_switch
.hidden ece408_emulator_switch
.type ece408_emulator_switch, @function
ece408_emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size ece408_emulator_switch, .-ece408_emulator_switch
)");
#else
#error "the emulator switches stacks on x86-64 only"
#endif

namespace ece408_emulator {

__thread Worker* worker;

namespace {

constexpr size_t STACK = 256 << 10, STACK_GUARD = 4 << 10, MOST_THREADS = 1024;
// After SPINS equal reads a spinning thread lets others run; after MOST_YIELDS yields and a time
// without a change, it is a deadlock.
constexpr uint32_t SPINS = 64, MOST_YIELDS = 200;
constexpr std::chrono::milliseconds LONGEST_SPIN{500};

}  // namespace

// Before the constructors of a kernel's file, which may allocate.
__attribute__((init_priority(101))) Emulator the_emulator;

Worker::Worker() {
    stacks_bytes_ = MOST_THREADS * STACK;
    stacks_begin_ = reinterpret_cast<uintptr_t>(pages(stacks_bytes_));
    shared_ = static_cast<char*>(pages(SHARED_REGION));
    shared_states = static_cast<uint8_t*>(pages(SHARED_REGION));
    is_ready = stacks_begin_ && shared_ && shared_states && shared_touched.make(SHARED_REGION);
}

Worker::~Worker() {
    if (stacks_begin_) munmap(reinterpret_cast<void*>(stacks_begin_), stacks_bytes_);
    if (shared_) munmap(shared_, SHARED_REGION);
    if (shared_states) munmap(shared_states, SHARED_REGION);
}

Fiber* Worker::idle_fiber() {
    if (!idle_.empty()) {
        Fiber* const found = idle_.back();
        idle_.pop_back();
        return found;
    }
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber* const made = fibers_.back().get();
    made->stack = reinterpret_cast<char*>(stacks_begin_) + (fibers_.size() - 1) * STACK;
    // A stack overflow ends the process, and does not overwrite another thread's variables.
    mprotect(made->stack, STACK_GUARD, PROT_NONE);
    void** top = reinterpret_cast<void**>(made->stack + STACK);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&Worker::fiber_main);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    made->top = top;
    return made;
}

void Worker::forget_fibers() {
    fibers_.clear();
    idle_.clear();
}

void Worker::fiber_main() {
    for (;;) {
        worker->run_threads();
        Worker& w = *worker;
        w.idle_.push_back(w.fiber_);
        ece408_emulator_switch(&w.fiber_->top, w.scheduler_);
    }
}

void Worker::run_threads() {
    while (begun_ < count_ && !running_->error.load(std::memory_order_relaxed)) {
        const uint32_t thread = order_[begun_++];
        threads_[thread].fiber = fiber_;
        threads_[thread].waits = Waits::NOT;
        place(thread);
        running_->thread(running_->call);
        settle(*this);
        threads_[current_].waits = Waits::ENDED;
        ++ended_;
        try_warp_of(current_);
    }
}

void Worker::place(uint32_t thread) {
    current_ = thread;
    const dim3& size = running_->block;
    threadIdx = {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
    own_tag_ = tag(running_->number, block_, thread, threads_[thread].clock);
}

void Worker::go_on(Fiber* fiber) {
    fiber_ = fiber;
    ece408_emulator_switch(&scheduler_, fiber->top);
}

void Worker::wait(Waits what, Place at) {
    const uint32_t thread = current_;
    settle(*this);
    threads_[thread].waits = what;
    threads_[thread].place = at;
    Fiber* const own = fiber_;
    ece408_emulator_switch(&own->top, scheduler_);
    place(thread);
}

// Other threads of the block run before the current one continues.
void Worker::yield() {
    if (next_ready_ >= MOST_THREADS) {
        ready_.erase(ready_.begin(), ready_.begin() + next_ready_);
        next_ready_ = 0;
    }
    ready_.push_back(current_);
    wait(Waits::NOT, {});
}

void Worker::spin(const void* address, size_t bytes, Place at, const void* returns_to) {
    Thread& own = threads_[current_];
    uint64_t value = 0;
    if (bytes == 4)
        memcpy(&value, address, 4);
    else
        memcpy(&value, address, std::min(bytes, sizeof value));
    if (own.spun_at != address || own.spun_value != value) {
        own.spun_at = address;
        own.spun_value = value;
        own.spun = own.yields = 0;
        be_stuck(false);
        return;
    }
    if (++own.spun < SPINS) return;
    own.spun = 0;
    const auto now = std::chrono::steady_clock::now();
    if (!own.yields++) own.spins_since = now;
    if (own.yields > MOST_YIELDS && now - own.spins_since > LONGEST_SPIN)
        spins_on(at, returns_to);
    yield();
}

// A thread has waited for long, while all others of its block waited or spun, too.
void Worker::spins_on(Place at, const void* returns_to) {
    be_stuck(true);
    const bool before = all_stuck_;
    all_stuck_ = running_->stuck >= running_->workers;
    // Another worker's last thread may have ended the wait after this one's last read.
    if (!all_stuck_ || !before) return;
    constexpr const char* TEXT = "waits for what no thread that can go on does";
    if (at.file)
        note(Kind::DEADLOCK, at, 0, TEXT);
    else
        note(Kind::DEADLOCK, returns_to, 0, TEXT);
    stop(LAUNCH_TIMEOUT);
}

void Worker::be_stuck(bool stuck) {
    if (stuck_ == stuck) return;
    stuck_ = stuck;
    all_stuck_ = false;
    running_->stuck += stuck ? 1 : -1;
}

void Worker::stop(int error) {
    int none = 0;
    running_->error.compare_exchange_strong(none, error);
    void* abandoned;
    ece408_emulator_switch(&abandoned, scheduler_);
    __builtin_unreachable();
}

void Worker::run(Running& running) {
    running_ = &running;
    worker = this;
    counts.reset(emulator().settings.counted ? new Counts : nullptr);
    blockDim = running.block;
    gridDim = running.grid;
    count_ = running.block.x * running.block.y * running.block.z;
    if (threads_.size() < count_) threads_.resize(count_);
    order_.resize(count_);
    for (uint32_t i = 0; i < count_; ++i) order_[i] = i;
    random_.seed(emulator().settings.seed);
    const uint64_t blocks = uint64_t{running.grid.x} * running.grid.y * running.grid.z;
    for (uint64_t i; !running.error && (i = running.next_block++) < blocks;) {
        const uint64_t number = running.order.empty() ? i : running.order[i];
        const uint64_t x = number % running.grid.x, rest = number / running.grid.x;
        blockIdx = {static_cast<unsigned>(x), static_cast<unsigned>(rest % running.grid.y),
                    static_cast<unsigned>(rest / running.grid.y)};
        run_block(static_cast<uint32_t>(number % BLOCKS));
    }
    be_stuck(false);
    --running.workers;
    if (running.error) forget_fibers();
    if (counts) counts->give(running.name, running.library_begin);
    worker = nullptr;
}

void Worker::begin_threads() {
    if (emulator().settings.random) std::shuffle(order_.begin(), order_.end(), random_);
    for (uint32_t i = 0; i < count_; ++i) {
        threads_[i].waits = Waits::NOT_BEGUN;
        threads_[i].clock = 1;
        threads_[i].spun_at = nullptr;
        threads_[i].released_at = threads_[i].acquired_at = 0;
        threads_[i].fenced = false;
        threads_[i].copies.begun.clear();
        threads_[i].copies.groups = 0;
    }
    begun_ = ended_ = at_barrier_ = at_active_ = 0;
    barrier_clock_ = 1;
    ready_.clear();
    next_ready_ = 0;
    acquired = unsettled = compares = false;
    read.address = nullptr;
    sequence_ = 0;
    if (warps_used_) std::fill(known_.begin(), known_.end(), 0);
    warps_used_ = false;
}

void Worker::run_block(uint32_t number) {
    block_ = number;
    many_blocks_ = tag(running_->number, MANY_BLOCKS, 0, 0) >> (CLOCK_BITS + THREAD_BITS);
    begin_threads();
    if (emulator().memory.checked()) {
        memset(shared_states, NO_MEMORY, shared_end_);
        if (running_->dynamic_bytes) shared_at(SHARED_GAP, running_->dynamic_bytes);
    }
    if (counts) {
        run_in_step();
        return;
    }
    while (ended_ < count_) {
        if (running_->error.load(std::memory_order_relaxed)) return;
        if (begun_ < count_) {
            go_on(idle_fiber());
        } else if (next_ready_ < ready_.size()) {
            const uint32_t thread = ready_[next_ready_++];
            current_ = thread;
            go_on(threads_[thread].fiber);
            if (next_ready_ == ready_.size()) ready_.clear(), next_ready_ = 0;
        } else if (at_active_) {
            release_active();
        } else if (at_barrier_ && at_barrier_ == count_ - ended_) {
            release_block();
        } else {
            no_one_can_go_on();
        }
    }
}

void Worker::end_step() {
    const uint3 index = threadIdx;
    const uint32_t thread = current_;
    Fiber* const own = fiber_;
    ece408_emulator_switch(&own->top, scheduler_);
    current_ = thread;
    threadIdx = index;
}

void Worker::begin_code(const void* code, const void* frame) {
    Thread& own = threads_[current_];
    own.code = reinterpret_cast<uintptr_t>(code);
    own.depth = reinterpret_cast<uintptr_t>(fiber_->stack) + STACK - reinterpret_cast<uintptr_t>(frame);
    end_step();
}

// Reconverges diverged lanes: lanes later in the code wait for earlier ones, and callers for
// callees.
bool Worker::step(uint32_t warp) {
    const uint32_t begin = warp * LANES, end = std::min(begin + LANES, count_);
    unsigned lanes = 0;
    const Thread* first = nullptr;
    for (uint32_t i = begin; i < end; ++i) {
        const Thread& each = threads_[i];
        if (each.waits != Waits::NOT) continue;
        const bool is_same = first && each.code == first->code && each.depth == first->depth;
        if (first && !is_same &&
            (each.depth < first->depth || (each.depth == first->depth && each.code > first->code)))
            continue;
        if (!is_same) {
            lanes = 0;
            first = &each;
        }
        lanes |= 1u << (i - begin);
    }
    if (!lanes) return false;
    const unsigned exist = existing(warp);
    const auto code = reinterpret_cast<const void*>(first->code);
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        current_ = begin + lane;
        counts->begin_lane(lane);
        go_on(threads_[current_].fiber);
        if (running_->error.load(std::memory_order_relaxed)) return false;
    }
    counts->end_step(lanes, exist, {code});
    return true;
}

void Worker::run_in_step() {
    // Warps that wait for each other without a barrier must all make progress.
    constexpr int STEPS = 64;
    while (begun_ < count_) go_on(idle_fiber());
    while (ended_ < count_) {
        bool goes_on = false;
        for (uint32_t warp = 0; warp * LANES < count_; ++warp)
            for (int i = 0; i < STEPS && step(warp); ++i) goes_on = true;
        if (running_->error.load(std::memory_order_relaxed)) return;
        if (goes_on || ended_ == count_) continue;
        if (at_active_) {
            release_active();
        } else if (at_barrier_ && at_barrier_ == count_ - ended_) {
            count_barrier();
            release_block();
        } else {
            no_one_can_go_on();
        }
    }
}

void Worker::count_barrier() {
    for (uint32_t warp = 0; warp * LANES < count_; ++warp) {
        unsigned lanes = 0;
        uint32_t last = 0;
        for (uint32_t i = warp * LANES; i < std::min((warp + 1) * LANES, count_); ++i)
            if (threads_[i].waits == Waits::FOR_BLOCK) lanes |= 1u << i % LANES, last = i;
        if (lanes) counts->add_barrier(threads_[last].place, lanes, existing(warp));
    }
}

Arrived Worker::arrive(int predicate, Place at) {
    threads_[current_].predicate = predicate;
    ++at_barrier_;
    wait(Waits::FOR_BLOCK, at);
    return arrived_;
}

void Worker::release_block() {
    const uint32_t first =
        std::find_if(threads_.begin(), threads_.begin() + count_,
                     [](const Thread& t) { return t.waits == Waits::FOR_BLOCK; }) -
        threads_.begin();
    arrived_ = {};
    uint32_t clock = 0;
    for (uint32_t i = 0; i < count_; ++i) {
        Thread& each = threads_[i];
        if (each.waits == Waits::ENDED) {
            place(first);
            note(Kind::BARRIER_NOT_REACHED, threads_[first].place, 0,
                 "%u of %u threads of the block have ended before, the first of them thread %u",
                 ended_, count_, i);
            continue;
        }
        if (each.place != threads_[first].place) {
            place(i);
            note(Kind::BARRIERS_DIFFER, each.place, 0,
                 "thread %u of the block waits at another __syncthreads()", first);
        }
        ++arrived_.threads;
        arrived_.sum += each.predicate != 0;
        clock = std::max(clock, each.clock);
    }
    barrier_clock_ = clock + 1;
    for (uint32_t i : order_) {
        Thread& each = threads_[i];
        if (each.waits != Waits::FOR_BLOCK) continue;
        each.clock = barrier_clock_;
        each.waits = Waits::NOT;
        ready_.push_back(i);
    }
    at_barrier_ = 0;
    if (emulator().settings.random) std::shuffle(ready_.begin(), ready_.end(), random_);
}

// The lanes of a warp whose threads have not ended.
unsigned Worker::existing(uint32_t warp) const {
    unsigned found = 0;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const uint32_t i = warp * LANES + lane;
        if (i < count_ && threads_[i].waits != Waits::ENDED) found |= 1u << lane;
    }
    return found;
}

bool Worker::knows(uint32_t thread, uint32_t clock) const {
    if (thread == current_) return true;
    if (warps_used_ && thread / LANES == current_ / LANES &&
        known_[current_ * LANES + thread % LANES] >= clock)
        return true;
    const Thread& other = threads_[thread];
    return other.released_at && other.released_at <= threads_[current_].acquired_at &&
           clock <= other.released;
}

bool Worker::ordered(Tag before, uint32_t lanes) const {
    if (launch_of(before) != (running_->number & 0xFF)) return true;
    const uint32_t clock = clock_of(before), thread = thread_of(before);
    if (block_of(before) != block_) {
        if (!acquired || !running_->any_released) return false;
        return block_of(before) != MANY_BLOCKS && running_->released[block_of(before)] != 0;
    }
    if (thread == current_ || clock < barrier_clock_) return true;
    if (thread >= BY_ATOMIC) return false;
    if (thread < SOME_LANES) return knows(thread, clock);
    for (uint32_t lane = 0; lane < LANES; ++lane)
        if (lanes >> lane & 1 && !knows((thread - SOME_LANES) * LANES + lane, clock)) return false;
    return true;
}

uint32_t Worker::unordered(Tag before, uint32_t lanes) const {
    const uint32_t clock = clock_of(before), first = current_ / LANES * LANES;
    if (clock < barrier_clock_) return 0;
    if (!warps_used_ && !acquired) return lanes;
    for (uint32_t lane = 0; lane < LANES; ++lane)
        if (lanes >> lane & 1 && knows(first + lane, clock)) lanes &= ~(1u << lane);
    return lanes;
}

void Worker::synchronize() {
    Thread& own = threads_[current_];
    acquired = true;
    if (own.fenced) {
        own.fenced = false;
        own.released = own.clock++;
        own.released_at = ++sequence_;
    }
    own.acquired_at = ++sequence_;
    place(current_);
}

void Worker::no_one_can_go_on() {
    uint32_t at_block = count_, at_warp = count_;
    for (uint32_t i = 0; i < count_; ++i) {
        if (threads_[i].waits == Waits::FOR_BLOCK) at_block = std::min(at_block, i);
        if (threads_[i].waits == Waits::FOR_WARP) at_warp = std::min(at_warp, i);
    }
    place(at_warp);
    const Thread& first = threads_[at_warp];
    const unsigned waiting = first.mask & existing(at_warp / LANES);
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const Thread& other = threads_[at_warp / LANES * LANES + lane];
        if (!(waiting >> lane & 1)) continue;
        if (other.waits == Waits::FOR_WARP && other.mask == first.mask && other.what == first.what)
            continue;
        const char* const where = other.waits == Waits::FOR_BLOCK ? "waits at __syncthreads()"
                                  : other.mask != first.mask      ? "gives another mask"
                                                                  : "calls another function";
        note(Kind::DEADLOCK, first.place, 0,
             "mask 0x%08x waits for lane %u, which %s", first.mask, lane, where);
        break;
    }
    int none = 0;
    running_->error.compare_exchange_strong(none, LAUNCH_TIMEOUT);
}

void* Worker::shared_at(size_t offset, size_t bytes) {
    if (emulator().memory.checked() && shared_states[offset] == NO_MEMORY) {
        memset(shared_states + offset, NEVER_WRITTEN, bytes);
        shared_end_ = std::max(shared_end_, offset + bytes);
    }
    return shared_ + offset;
}

// --- Functions that translated kernels call.

// Gives a variable its offset in this launch; 0 without room.
static uint64_t place_slot(Slot* slot, Running& running, size_t bytes, size_t alignment) {
    static std::mutex lock;
    std::lock_guard<std::mutex> hold(lock);
    uint64_t found = __atomic_load_n(&slot->launch_and_offset, __ATOMIC_ACQUIRE);
    if (found >> 32 == running.number) return found;
    const size_t step = std::max(alignment, SHARED_ALIGNMENT);
    const size_t begin = (running.shared_end + SHARED_GAP + step - 1) / step * step;
    running.static_bytes += bytes;
    if (running.static_bytes > LARGEST_STATIC_SHARED ||
        running.static_bytes + running.dynamic_bytes > running.most_shared)
        return 0;
    running.shared_end = begin + bytes;
    found = uint64_t{running.number} << 32 | begin;
    __atomic_store_n(&slot->launch_and_offset, found, __ATOMIC_RELEASE);
    return found;
}

void* shared(Slot* slot, size_t bytes, size_t alignment) {
    Worker& w = *worker;
    Running& running = w.running();
    uint64_t found = __atomic_load_n(&slot->launch_and_offset, __ATOMIC_ACQUIRE);
    if (found >> 32 != running.number) found = place_slot(slot, running, bytes, alignment);
    if (!found) {
        note(Kind::TRAP, __builtin_return_address(0), bytes,
             "the kernel's shared variables take more than %zu bytes", LARGEST_STATIC_SHARED);
        w.stop(INVALID_VALUE);
    }
    return w.shared_at(found & 0xFFFFFFFF, bytes);
}

void* dynamic_shared(size_t) { return worker->shared_ + SHARED_GAP; }

void fence() {
    if (!worker) return;
    worker->fence();
    Running& running = worker->running();
    running.released[worker->block()] = 1;
    running.any_released = true;
}

void fence_block() {
    if (worker) worker->fence();
}

void trap(Place place, const char* what) {
    if (!worker) {
        fprintf(stderr, "%s:%d: %s\n", place.file, place.line, what);
        abort();
    }
    note(Kind::TRAP, place, 0, "%s", what);
    worker->stop(ASSERTED);
}

namespace {

struct sigaction action_before;

// A stack overflow hits the guard page before the next stack: the launch ends, with the line of the
// function.
void on_segv(int number, siginfo_t* info, void* context) {
    if (!worker || !worker->on_stack(reinterpret_cast<uintptr_t>(info->si_addr))) {
        // The access is retried.
        sigaction(number, &action_before, nullptr);
        return;
    }
    const auto at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] + 1;
    note(Kind::TRAP, reinterpret_cast<const void*>(at), 0,
         "a thread's local memory and calls take more than the %zu KB that it has here", STACK >> 10);
    worker->stop(LAUNCH_FAILURE);
}

// For the signal handler, on this core's thread, while its CUDA threads run.
class SignalStack {
public:
    SignalStack() {
        stack_t own{};
        own.ss_sp = room_;
        own.ss_size = sizeof room_;
        sigaltstack(&own, &before_);
    }
    ~SignalStack() { sigaltstack(&before_, nullptr); }

private:
    char room_[32 << 10];
    stack_t before_{};
};

void run_on(Worker& own, Running& running) {
    const SignalStack stack;
    // A GPU sets no errno, the C library's functions in a kernel do.
    const int before = errno;
    own.run(running);
    errno = before;
}

int refused(const Launch& launch, size_t most_shared) {
    const dim3 &g = launch.grid, &b = launch.block;
    const uint64_t threads = uint64_t{b.x} * b.y * b.z;
    if (!threads || threads > MOST_THREADS || b.x > 1024 || b.y > 1024 || b.z > 64)
        return INVALID_CONFIGURATION;
    if (!g.x || !g.y || !g.z || g.x > 0x7FFFFFFF || g.y > 65535 || g.z > 65535)
        return INVALID_CONFIGURATION;
    return launch.shared_bytes > most_shared ? INVALID_VALUE : SUCCESS;
}

}  // namespace

uint32_t Emulator::next_operation() {
    if (!(++operations & 0xFF)) {
        ++operations;
        memory.touched.forget();
        for (auto& each : workers) each->shared_touched.forget();
        streams.forget();
    }
    return operations;
}

void Launch::begin(const char* name, void (*thread)(void*), void* call) const {
    Emulator& e = emulator();
    if (worker) trap({name, 0}, "a kernel launches another: that is not emulated");
    std::lock_guard<std::mutex> alone(e.running);
    if (e.sticky) return;
    if (!e.streams.has(stream)) {
        note(Kind::FAILED_CALL, __builtin_return_address(0), 0, "launches %s on a stream that is not there", name);
        e.last = INVALID_RESOURCE;
        e.last_by_free = false;
        return;
    }
    if (const int error = refused(*this, e.most_shared)) {
        note(Kind::FAILED_CALL, __builtin_return_address(0), 0,
             "launches %s with (%u,%u,%u) blocks of (%u,%u,%u) threads and %zu bytes of shared memory: "
             "0 blocks or threads, or more than 1024 threads, 65535 blocks in y or z or %zu bytes", name,
             grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, e.most_shared);
        e.last = error;
        e.last_by_free = false;
        return;
    }
    e.memory.make(e.settings.checked, e.settings.cores);
    Running running;
    running.name = name;
    running.grid = grid;
    running.block = block;
    running.dynamic_bytes = shared_bytes;
    running.shared_end = SHARED_GAP + shared_bytes;
    running.most_shared = e.most_shared;
    running.thread = thread;
    running.call = call;
    std::tie(running.library_begin, running.library_end) =
        library_of(reinterpret_cast<const void*>(thread));
    running.number = e.next_operation();
    running.unordered = e.streams.begin(stream, running.number & 0xFF, running.library_begin);
    const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
    running.released.reset(new std::atomic<uint8_t>[std::min<uint64_t>(blocks, BLOCKS)]());
    if (e.settings.random) {
        running.order.resize(blocks);
        for (uint64_t i = 0; i < blocks; ++i) running.order[i] = static_cast<uint32_t>(i);
        std::mt19937_64 random(e.settings.seed);
        std::shuffle(running.order.begin(), running.order.end(), random);
    }
    size_t cores =
        e.settings.random ? 1 : std::min<uint64_t>(std::max(e.settings.cores, 1), blocks);
    while (e.workers.size() < cores) {
        auto made = std::make_unique<Worker>();
        if (!made->is_ready) break;
        e.workers.push_back(std::move(made));
    }
    // Fewer workers run if there is no room for more.
    cores = std::min(cores, e.workers.size());
    if (!cores) no_memory(MOST_THREADS * STACK);
    running.workers = static_cast<int>(cores);
    std::vector<std::thread> others;
    struct sigaction action{};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &action_before);
    for (size_t i = 1; i < cores; ++i)
        others.emplace_back([&running, &e, i] { run_on(*e.workers[i], running); });
    run_on(*e.workers[0], running);
    for (std::thread& each : others) each.join();
    sigaction(SIGSEGV, &action_before, nullptr);
    if (e.settings.counted) note_launch(name, grid, block, running.static_bytes, shared_bytes);
    if (const int error = running.error) {
        e.last = error;
        if (error != INVALID_VALUE) e.sticky = error;
    }
}

}  // namespace ece408_emulator
