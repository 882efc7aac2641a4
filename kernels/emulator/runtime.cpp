// Runs the blocks of a launch on the machine's cores, and each block's threads on stacks of their
// own: a thread that waits, for its block or its warp, lets others of the block go on.

#include "runtime.h"

#include <sys/mman.h>

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

// Keeps what the caller must find again, and goes on where another stack was left.
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
constexpr unsigned ALL_LANES = 0xFFFFFFFF;
// After so many looks that found the same, a spinning thread lets others go on; if nothing has
// changed after so many times and so long, nothing will.
constexpr uint32_t SPINS = 64, MOST_YIELDS = 200;
constexpr std::chrono::milliseconds LONGEST_SPIN{500};

uint64_t reduced(Warp what, uint64_t a, uint64_t b) {
    const auto x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
    const auto s = static_cast<int32_t>(x), t = static_cast<int32_t>(y);
    switch (what) {
        case Warp::ADD: return x + y;
        case Warp::MIN: return static_cast<uint32_t>(std::min(s, t));
        case Warp::MAX: return static_cast<uint32_t>(std::max(s, t));
        case Warp::UMIN: return std::min(x, y);
        case Warp::UMAX: return std::max(x, y);
        case Warp::AND: return x & y;
        case Warp::OR: return x | y;
        default: return x ^ y;
    }
}

}  // namespace

// Before the constructors of a kernel's file, which may allocate.
__attribute__((init_priority(101))) Emulator the_emulator;

Worker::Worker() {
    stacks_bytes_ = MOST_THREADS * STACK;
    stacks_begin_ = reinterpret_cast<uintptr_t>(pages(stacks_bytes_));
    shared_ = static_cast<char*>(pages(SHARED_REGION));
    shared_states = static_cast<uint8_t*>(pages(SHARED_REGION));
    shared_written = static_cast<Tag*>(pages(SHARED_REGION / 2 * sizeof(Tag)));
    shared_read = static_cast<Tag*>(pages(SHARED_REGION / 2 * sizeof(Tag)));
    if (!stacks_begin_ || !shared_ || !shared_states || !shared_written || !shared_read) {
        fprintf(stderr, "the emulator has no room for the stacks of a block\n");
        abort();
    }
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
    // Who goes beyond its stack ends the process, not another thread's variables.
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
        threads_[current_].waits = Waits::ENDED;
        ++ended_;
        try_warp_of(current_);
    }
}

void Worker::place(uint32_t thread) {
    current_ = thread;
    const dim3& size = running_->block;
    threadIdx = {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
}

void Worker::go_on(Fiber* fiber) {
    fiber_ = fiber;
    ece408_emulator_switch(&scheduler_, fiber->top);
}

void Worker::wait(Waits what, Place at) {
    const uint32_t thread = current_;
    threads_[thread].waits = what;
    threads_[thread].place = at;
    Fiber* const own = fiber_;
    ece408_emulator_switch(&own->top, scheduler_);
    place(thread);
}

// Others of the block go on before the current thread does.
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
    // Another worker's last thread may have ended it after this one's last look.
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
    }
    begun_ = ended_ = at_barrier_ = 0;
    barrier_clock_ = 1;
    ready_.clear();
    next_ready_ = 0;
    acquired = false;
    if (warps_used_) std::fill(known_.begin(), known_.end(), 0);
    warps_used_ = false;
}

void Worker::run_block(uint32_t number) {
    block_ = number;
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

// Lanes that have parted meet again: those that come later in the code wait for those before them,
// and callers for what they call.
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
    counts->end_step(lanes, exist, {code, {nullptr, 0}});
    return true;
}

void Worker::run_in_step() {
    // Warps that wait for each other without a barrier must all go on.
    constexpr int STEPS = 64;
    while (begun_ < count_) go_on(idle_fiber());
    while (ended_ < count_) {
        bool goes_on = false;
        for (uint32_t warp = 0; warp * LANES < count_; ++warp)
            for (int i = 0; i < STEPS && step(warp); ++i) goes_on = true;
        if (running_->error.load(std::memory_order_relaxed)) return;
        if (goes_on || ended_ == count_) continue;
        if (at_barrier_ && at_barrier_ == count_ - ended_) {
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

// The lanes of a warp that are threads which have not ended.
unsigned Worker::existing(uint32_t warp) const {
    unsigned found = 0;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        const uint32_t i = warp * LANES + lane;
        if (i < count_ && threads_[i].waits != Waits::ENDED) found |= 1u << lane;
    }
    return found;
}

unsigned Worker::present_lanes() const { return existing(current_ / LANES); }

uint64_t Worker::together(Place at, Warp what, unsigned mask, uint64_t value, int lane,
                          int width) {
    Thread& own = threads_[current_];
    const uint32_t warp = current_ / LANES, own_lane = current_ % LANES;
    if (!(mask >> own_lane & 1)) {
        note(Kind::WRONG_MASK, at, 0, "mask 0x%08x lacks the calling lane, %u", mask,
             own_lane);
        return value;
    }
    own.what = what;
    own.mask = mask;
    own.value = value;
    own.lane = lane;
    own.width = width;
    own.place = at;
    own.waits = Waits::FOR_WARP;
    release_warp(warp, mask);
    if (own.waits == Waits::FOR_WARP)
        wait(Waits::FOR_WARP, at);
    else if (counts)
        end_step();
    return own.result;
}

// If all lanes of the mask have come, they go on; the calling one by itself, others when it is
// their turn.
void Worker::release_warp(uint32_t warp, unsigned mask) {
    const unsigned lanes = mask & existing(warp);
    const Thread* first = nullptr;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const Thread& each = threads_[warp * LANES + lane];
        if (each.waits != Waits::FOR_WARP || each.mask != mask) return;
        if (first && each.what != first->what) return;
        if (!first) first = &each;
    }
    answer(warp, lanes);
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const uint32_t i = warp * LANES + lane;
        threads_[i].waits = Waits::NOT;
        if (i != current_) ready_.push_back(i);
    }
}

void Worker::answer(uint32_t warp, unsigned lanes) {
    Thread* const all = &threads_[warp * LANES];
    unsigned voted = 0;
    uint64_t total = 0;
    bool any = false;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        voted |= unsigned{all[lane].value != 0} << lane;
        total = any ? reduced(all[lane].what, total, all[lane].value) : all[lane].value;
        any = true;
    }
    for (int lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        Thread& each = all[lane];
        const int begin = lane / each.width * each.width, end = begin + each.width;
        int from = lane;
        switch (each.what) {
            case Warp::SYNC:
            case Warp::GATHER: each.result = 0; continue;
            case Warp::BALLOT: each.result = voted; continue;
            case Warp::MATCH:
                each.result = 0;
                for (int other = 0; other < LANES; ++other)
                    if (lanes >> other & 1 && all[other].value == each.value)
                        each.result |= uint64_t{1} << other;
                continue;
            case Warp::INDEX: from = begin + (each.lane & (each.width - 1)); break;
            case Warp::UP: from = lane - each.lane < begin ? lane : lane - each.lane; break;
            case Warp::DOWN: from = lane + each.lane >= end ? lane : lane + each.lane; break;
            case Warp::XOR: from = (lane ^ each.lane) >= end ? lane : lane ^ each.lane; break;
            default: each.result = total; continue;
        }
        if (!(lanes >> from & 1)) {
            const uint32_t calling = current_;
            place(warp * LANES + lane);
            note(Kind::WRONG_MASK, each.place, 0,
                 "lane %d reads from lane %d, which does not take part", lane, from);
            place(calling);
            from = lane;
        }
        each.result = all[from].value;
    }
    if (all[__builtin_ctz(lanes)].what == Warp::GATHER) {
        gathered_.resize(threads_.size());
        for (uint32_t lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1) gathered_[warp * LANES + lane] = all[lane].value;
    }
    // Each lane now knows what the others knew.
    if (known_.size() < threads_.size() * LANES) known_.resize(threads_.size() * LANES);
    warps_used_ = true;
    uint32_t most[LANES] = {};
    for (int lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const uint32_t* const row = &known_[(warp * LANES + lane) * LANES];
        for (int other = 0; other < LANES; ++other) most[other] = std::max(most[other], row[other]);
        most[lane] = std::max(most[lane], all[lane].clock);
        ++all[lane].clock;
    }
    for (int lane = 0; lane < LANES; ++lane)
        if (lanes >> lane & 1) memcpy(&known_[(warp * LANES + lane) * LANES], most, sizeof most);
}

void Worker::copy_values(const void* (&to)[LANES]) const {
    const uint32_t first = current_ / LANES * LANES;
    for (uint32_t lane = 0; lane < LANES; ++lane)
        to[lane] = reinterpret_cast<const void*>(gathered_[first + lane]);
}

// After a thread has ended: what waits for its warp may have waited for it alone.
void Worker::try_warp_of(uint32_t thread) {
    if (!warps_used_ && ready_.empty() && ended_ == begun_) return;
    const uint32_t warp = thread / LANES;
    for (uint32_t i = warp * LANES; i < std::min((warp + 1) * LANES, count_); ++i)
        if (threads_[i].waits == Waits::FOR_WARP) {
            const unsigned mask = threads_[i].mask;
            release_warp(warp, mask);
        }
}

bool Worker::ordered(Tag before) const {
    if (launch_of(before) != (running_->number & 0xFF)) return true;
    const uint32_t clock = clock_of(before), thread = thread_of(before);
    if (block_of(before) != block_) {
        if (!acquired || !running_->any_released) return false;
        return block_of(before) != MANY_BLOCKS && running_->released[block_of(before)] != 0;
    }
    if (thread == current_ || clock < barrier_clock_) return true;
    if (!warps_used_ || thread >= BY_ATOMIC || thread / LANES != current_ / LANES) return false;
    return known_[current_ * LANES + thread % LANES] >= clock;
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

// --- What translated kernels call.

// Give a variable its offset in this launch; 0 where there is no room for it.
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

uint64_t together(Place place, Warp what, unsigned mask, uint64_t value, int lane, int width) {
    return worker->together(place, what, mask, value, lane, width);
}

void gather(Place place, const void* own, const void* (&all)[LANES]) {
    const auto value = reinterpret_cast<uint64_t>(own);
    worker->together(place, Warp::GATHER, ALL_LANES, value, 0, LANES);
    worker->copy_values(all);
}

unsigned present_lanes() { return worker->present_lanes(); }

void fence() {
    if (!worker) return;
    Running& running = worker->running();
    running.released[worker->block()] = 1;
    running.any_released = true;
}

void trap(Place place, const char* what) {
    if (!worker) {
        fprintf(stderr, "%s:%d: %s\n", place.file, place.line, what);
        abort();
    }
    note(Kind::TRAP, place, 0, "%s", what);
    worker->stop(ASSERTED);
}

void Worker::forget_touches() {
    for (Tag* each : {shared_written, shared_read})
        madvise(each, SHARED_REGION / 2 * sizeof(Tag), MADV_DONTNEED);
}

namespace {

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

void Launch::begin(const char* name, void (*thread)(void*), void* call) const {
    Emulator& e = emulator();
    if (worker) trap({name, 0}, "a kernel launches another: that is not emulated");
    std::lock_guard<std::mutex> alone(e.running);
    if (e.sticky) return;
    if (const int error = refused(*this, e.most_shared)) {
        e.last = error;
        return;
    }
    e.memory.make(e.settings.checked);
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
    // Tags have the launch's last 8 bits only, which are 0 of what no launch has touched.
    const bool is_again = !(++e.launches & 0xFF);
    if (is_again) ++e.launches;
    running.number = e.launches;
    const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
    running.released.reset(new std::atomic<uint8_t>[std::min<uint64_t>(blocks, BLOCKS)]());
    if (e.settings.random) {
        running.order.resize(blocks);
        for (uint64_t i = 0; i < blocks; ++i) running.order[i] = static_cast<uint32_t>(i);
        std::mt19937_64 random(e.settings.seed);
        std::shuffle(running.order.begin(), running.order.end(), random);
    }
    const size_t cores =
        e.settings.random ? 1 : std::min<uint64_t>(std::max(e.settings.cores, 1), blocks);
    while (e.workers.size() < cores) e.workers.push_back(std::make_unique<Worker>());
    if (is_again) {
        e.memory.forget_touches();
        for (auto& each : e.workers) each->forget_touches();
    }
    running.workers = static_cast<int>(cores);
    std::vector<std::thread> others;
    for (size_t i = 1; i < cores; ++i)
        others.emplace_back([&running, &e, i] { e.workers[i]->run(running); });
    e.workers[0]->run(running);
    for (std::thread& each : others) each.join();
    if (e.settings.counted) note_launch(name, grid, block, running.static_bytes, shared_bytes);
    if (const int error = running.error) {
        e.last = error;
        if (error != INVALID_VALUE) e.sticky = error;
    }
}

}  // namespace ece408_emulator
