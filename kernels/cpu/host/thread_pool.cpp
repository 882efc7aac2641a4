// The thread pool: its own workers, or the threads of GNU's OpenMP, which MXNet uses. Workers start
// at the first call and sleep between calls until the process ends; concurrent callers use the same
// workers.
//
// A caller takes one of a few slots and writes its job there. The caller claims chunks from the
// front, workers from the back. So each of two threads computes one half, the same half of every
// layer, which is still in its core's caches; with chunks handed out in order densenet121 took 6 %
// longer at batch 1. Claims are subtracted from the number of chunks left. The same word counts how
// often the slot was filled: a worker that read a slot, lost its core, and returns when the slot
// holds another job claims nothing of it. Slots are never freed, so a worker may read any slot at
// any time.
//
// A worker that waits for a job, and a caller that waits for others' chunks, first spin: most waits
// end within microseconds, and waking a thread takes longer. Then they sleep, because another
// thread may need the core, perhaps the one that they wait for.
#include "host/thread_pool.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ece408 {
namespace {

// Concurrent callers that can have help.
constexpr int kSlots = 16;
constexpr int kMostThreads = 1023;
// A claim is 1 / kParts of the chunks left per thread: long ranges first and single
// chunks at the end, so that all threads end together.
constexpr int64_t kParts = 4;
constexpr int64_t kSpinNs = 100 * 1000;

constexpr auto relaxed = std::memory_order_relaxed;

// A slot's ticket: how often the slot was filled (32 bits), threads that have joined (10), chunks
// (or portions of many chunks) that workers have claimed (11), and those left to claim (11).
constexpr uint64_t kByWorkers = uint64_t{1} << 11, kThread = kByWorkers << 11;
constexpr uint64_t kFilling = uint64_t{1} << 32;
constexpr int64_t kMostPortions = kByWorkers - 1;

int64_t left_of(uint64_t ticket) { return static_cast<int64_t>(ticket % kByWorkers); }
int64_t by_workers_of(uint64_t ticket) {
    return static_cast<int64_t>(ticket % kThread / kByWorkers);
}
int threads_of(uint64_t ticket) { return static_cast<int>(ticket % kFilling / kThread); }
uint64_t filling_of(uint64_t ticket) { return ticket / kFilling; }

// A bit beside the number of unfinished portions: the caller sleeps.
constexpr uint32_t kCallerSleeps = uint32_t{1} << 31;

struct Job {
    ece408_chunks* body;
    const void* work;
    int64_t count, portions;
    int threads;

    // Portions that one claim takes, given `left` unclaimed ones.
    int64_t claim(int64_t left) const {
        const int64_t some = left / (kParts * threads);
        return some < 1 ? 1 : some;
    }
    // Runs the portions claimed from a slot with this ticket: the first ones left for the caller,
    // the last ones for a worker.
    void run(uint64_t ticket, int64_t claimed, int thread_index) const {
        const int64_t end = portions - by_workers_of(ticket);
        const int64_t first = end - (thread_index ? claimed : left_of(ticket));
        body(work, count * first / portions, count * (first + claimed) / portions, thread_index);
    }
};

struct alignas(128) Slot {
    std::atomic<bool> taken;
    std::atomic<uint64_t> ticket;
    std::atomic<uint32_t> unfinished;
    // The job. It does not change while portions are left to claim.
    std::atomic<ece408_chunks*> body;
    std::atomic<const void*> work;
    std::atomic<int64_t> count, portions;
    std::atomic<int> threads;

    // Returns the ticket; the caller has joined.
    uint64_t fill(const Job& job) {
        body.store(job.body, relaxed);
        work.store(job.work, relaxed);
        count.store(job.count, relaxed);
        portions.store(job.portions, relaxed);
        threads.store(job.threads, relaxed);
        unfinished.store(static_cast<uint32_t>(job.portions), relaxed);
        const uint64_t filled = (filling_of(ticket.load(relaxed)) + 1) * kFilling;
        const uint64_t full = filled + kThread + static_cast<uint64_t>(job.portions);
        ticket.store(full, std::memory_order_release);
        return full;
    }

    // The job of the filling whose ticket was read; valid only if a claim succeeds afterwards.
    Job job() const {
        return {body.load(relaxed), work.load(relaxed), count.load(relaxed),
                portions.load(relaxed), threads.load(relaxed)};
    }
};

// A worker: its thread number, 0 until it runs, and the core that it avoids.
struct Worker {
    std::atomic<int> thread, away_from;
};

Slot slots[kSlots];
Worker all_workers[kMostThreads];
// Incremented when a slot is filled; workers sleep on it.
alignas(128) std::atomic<uint32_t> bell;
// Time until which more jobs are expected soon.
std::atomic<int64_t> expected_until;
// Numbers of workers in all, asleep or about to be, and spinning on the bell.
alignas(128) std::atomic<int> workers, sleeping, listening;

int current_thread() { return static_cast<int>(syscall(SYS_gettid)); }

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

// End of a spin that begins now.
int64_t spin_end() { return now_ns() + kSpinNs; }

// Whether `over` becomes true before `end`.
template <class Over>
bool spin(int64_t end, const Over& over) {
    do {
        for (int i = 0; i < 16; ++i) {
            if (over()) return true;
#if defined(__SSE2__)
            _mm_pause();
#endif
        }
    } while (now_ns() < end);
    return false;
}

void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
    static_assert(sizeof word == sizeof value, "a futex is a plain word");
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(const std::atomic<uint32_t>& word, int most) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

// The ticket after a thread's claim.
uint64_t after_claim(uint64_t ticket, int64_t claimed, int thread_index) {
    const uint64_t some = static_cast<uint64_t>(claimed);
    return ticket - some + (thread_index ? some * kByWorkers : 0);
}

// Claims and runs portions of this ticket's filling until none are left; returns the number of
// portions run.
uint32_t run_portions(Slot& slot, const Job& job, uint64_t ticket, int thread_index) {
    const uint64_t filling = filling_of(ticket);
    int64_t done = 0;
    while (filling_of(ticket) == filling && left_of(ticket) > 0) {
        const int64_t claimed = job.claim(left_of(ticket));
        const uint64_t next = after_claim(ticket, claimed, thread_index);
        if (!slot.ticket.compare_exchange_weak(ticket, next, relaxed)) continue;
        job.run(ticket, claimed, thread_index);
        done += claimed;
        ticket = slot.ticket.load(relaxed);
    }
    return static_cast<uint32_t>(done);
}

// Lets a worker join a slot; false if it has nothing to do.
bool help(Slot& slot) {
    uint64_t ticket = slot.ticket.load(std::memory_order_acquire);
    Job job;
    int64_t claimed;
    int thread_index;
    uint64_t joined;
    do {
        thread_index = threads_of(ticket);
        job = slot.job();
        if (left_of(ticket) == 0 || thread_index >= job.threads) return false;
        claimed = job.claim(left_of(ticket));
        joined = after_claim(ticket, claimed, thread_index) + kThread;
    } while (!slot.ticket.compare_exchange_weak(ticket, joined, std::memory_order_acquire));
    job.run(ticket, claimed, thread_index);
    const uint64_t next = slot.ticket.load(relaxed);
    uint32_t done = static_cast<uint32_t>(claimed);
    if (filling_of(next) == filling_of(ticket)) done += run_portions(slot, job, next, thread_index);
    // Once all is done, the slot may belong to another caller, which a spurious wake does not harm.
    if (slot.unfinished.fetch_sub(done, std::memory_order_acq_rel) - done == kCallerSleeps)
        wake(slot.unfinished, 1);
    return true;
}

void* be_worker(void* self) {
    static_cast<Worker*>(self)->thread = current_thread();
    for (int64_t end = spin_end();;) {
        const uint32_t heard = bell.load(std::memory_order_acquire);
        bool helped = false;
        for (Slot& slot : slots) helped = help(slot) || helped;
        if (helped) {
            end = spin_end();
            continue;
        }
        // The bell may ring for other slots again and again; that must not keep this worker awake.
        listening.fetch_add(1, relaxed);
        const bool rung = spin(end, [&] { return bell.load(relaxed) != heard; });
        listening.fetch_sub(1, relaxed);
        if (rung) continue;
        const int64_t expected = expected_until.load(relaxed);
        if (expected > end) {
            end = expected;
            continue;
        }
        sleeping.fetch_add(1);
        if (bell.load() == heard) sleep_while(bell, heard);
        sleeping.fetch_sub(1);
        end = spin_end();
    }
    return nullptr;
}

// Starts a detached thread; false if the system refuses. It blocks all signals, which are for the
// program's own threads.
bool start_thread(void* (*run)(void*), void* argument) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const bool started = pthread_create(&thread, &attributes, run, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    return started;
}

bool start_workers(int first, int last) {
    for (int i = first; i < last; ++i) {
        all_workers[i].away_from = -1;
        if (!start_thread(be_worker, &all_workers[i])) return i > first;
    }
    return true;
}

// Starts workers until there are `wanted`, or as many as the system allows.
void ensure_workers(int wanted) {
    int there = workers.load(relaxed);
    while (there < wanted)
        if (workers.compare_exchange_weak(there, wanted)) {
            if (!start_workers(there, wanted)) workers.store(there);
            return;
        }
}

// Keeps workers off the caller's core. If no core is free, Linux tends to put a thread on the core
// of the thread that wakes it, where it must wait for that one.
void keep_off_caller_core(int helpers) {
    const int here = sched_getcpu();
    cpu_set_t cores;
    CPU_ZERO(&cores);
    for (int i = 0; i < helpers; ++i) {
        Worker& worker = all_workers[i];
        const int thread = worker.thread.load(relaxed);
        if (thread == 0 || worker.away_from.exchange(here, relaxed) == here) continue;
        if (CPU_COUNT(&cores) == 0) {
            if (sched_getaffinity(0, sizeof cores, &cores) != 0) return;
            CPU_CLR(here, &cores);
            if (CPU_COUNT(&cores) == 0) return;
        }
        sched_setaffinity(thread, sizeof cores, &cores);
    }
}

void ring(int helpers) {
    keep_off_caller_core(helpers);
    bell.fetch_add(1);
    helpers -= listening.load(relaxed);
    if (helpers > 0 && sleeping.load() > 0) wake(bell, helpers);
}

void wait_for_others(Slot& slot) {
    const auto finished = [&] { return slot.unfinished.load(std::memory_order_acquire) == 0; };
    if (spin(spin_end(), finished)) return;
    uint32_t left = slot.unfinished.fetch_or(kCallerSleeps, std::memory_order_acq_rel);
    for (left |= kCallerSleeps; left != kCallerSleeps;
         left = slot.unfinished.load(std::memory_order_acquire))
        sleep_while(slot.unfinished, left);
}

using OpenMPParallel = void(void (*run)(void*), void* argument, unsigned threads, unsigned flags);

// The entry of GNU's OpenMP for a parallel region, if the library is loaded.
OpenMPParallel* find_openmp() {
    void* const library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<OpenMPParallel*>(dlsym(library, "GOMP_parallel")) : nullptr;
}

// OpenMP's threads spin for some milliseconds after each of MXNet's operators. If the machine has
// cores for them, they are awake when a kernel begins, and workers would compete with them. But a
// parallel region ends only when all its threads have arrived. Beside other busy programs it waits
// for threads that have no core, while spinning threads take cores from working ones. Therefore:
//
// - A call is a parallel region as long as regions do not wait long at their ends, and OpenMP's
// threads are awake when a region soon follows another.
//
// - Otherwise workers help for some time. On a busy machine a crowd of sleeping threads in another
// region makes OpenMP count more threads than cores, and then it hardly spins. It does so by itself
// if two threads of a program have had regions; waking its threads again and again then made
// mobilenetv2_1.0 take 9.5 ms on two cores, where spinning workers take 7.2.
//
// - After that a region is tried again.
//
// The time that regions lose by waiting is added up, less a part of their working time. One region
// counts at most kMostLost, because a virtual machine may pause. For regions that soon follow
// others, late ones are counted and punctual ones subtracted.
constexpr int64_t kMicrosecond = 1000, kMillisecond = 1000 * kMicrosecond;
constexpr int64_t kMostLost = kMillisecond, kForgiven = 32, kBusy = 4 * kMillisecond;
// Time to wake a sleeping thread on an idle machine.
constexpr int64_t kWakes = 100 * kMicrosecond;
// An awake thread arrives within this time, a sleeping one does not.
constexpr int64_t kLate = 5 * kMicrosecond;
// OpenMP's threads spin for longer than this, if they spin.
constexpr int64_t kSoon = 200 * kMicrosecond;
constexpr int kMostLate = 32, kMostLateInTrial = 4;
// After a pause of this length some of OpenMP's threads may sleep.
constexpr int64_t kPause = 5 * kMillisecond;
// How long the machine counts as busy; doubled each time it is found busy again within kTrial.
constexpr int64_t kFirstBusy = 100 * kMillisecond, kLongestBusy = 4000 * kMillisecond;
constexpr int64_t kTrial = 1000 * kMillisecond;

std::atomic<bool> busy;
std::atomic<int64_t> lost, quiet_since, busy_for, busy_until, last_end;
std::atomic<int> late;

OpenMPParallel* openmp() {
    static OpenMPParallel* const found = find_openmp();
    return found;
}

void sleep_in_crowd(void* until) {
    const int64_t end = *static_cast<const int64_t*>(until);
    const timespec time = {end / 1000000000, end % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) continue;
}

void* hold_crowd(void*) {
    int64_t until = busy_until.load();
    cpu_set_t cores;
    const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
    openmp()(sleep_in_crowd, &until, known ? static_cast<unsigned>(CPU_COUNT(&cores)) : 2, 0);
    return nullptr;
}

void become_busy(int64_t now, bool needs_crowd) {
    if (busy.exchange(true)) return;
    const bool was_trial = now - quiet_since.load(relaxed) < kTrial;
    const int64_t longer = std::clamp(2 * busy_for.load(relaxed), kFirstBusy, kLongestBusy);
    busy_for.store(was_trial ? longer : kFirstBusy, relaxed);
    busy_until.store(now + busy_for.load(relaxed));
    if (needs_crowd) start_thread(hold_crowd, nullptr);
}

// Set for a thread beside another one that has regions: OpenMP would count the threads of both.
thread_local bool uses_workers = false;

// Whether a call should be a parallel region.
bool is_region_due() {
    if (uses_workers || !openmp()) return false;
    if (!busy.load(relaxed)) return true;
    const int64_t now = now_ns();
    if (now < busy_until.load(relaxed)) return false;
    if (busy.exchange(false)) {
        lost.store(kBusy - kMostLost / 2, relaxed);
        late.store(kMostLate - kMostLateInTrial, relaxed);
        quiet_since.store(now, relaxed);
    }
    return true;
}

// The threads of a caller's last parallel region, up to a limit. After a pause they sleep. If a
// core is occupied when they wake, perhaps by a thread about to sleep, Linux puts one of them on
// the caller's core; the caller spins at the end of the region, and that thread had to wait for
// some 12 ms.
class Sleepers {
public:
    static constexpr int kMost = 15;

    void know(const std::atomic<int>* threads, int count) {
        count_ = std::min(count, kMost);
        for (int i = 0; i < count_; ++i) threads_[i] = threads[i].load(relaxed);
    }
    // Keeps them off this core until `release`. Threads bound to a single core stay there.
    void avoid_this_core() {
        const int here = sched_getcpu();
        for (int i = 0; i < count_; ++i) {
            moved_[i] = sched_getaffinity(threads_[i], sizeof cores_[i], &cores_[i]) == 0 &&
                         CPU_ISSET(here, &cores_[i]) && CPU_COUNT(&cores_[i]) > 1;
            if (!moved_[i]) continue;
            cpu_set_t others = cores_[i];
            CPU_CLR(here, &others);
            sched_setaffinity(threads_[i], sizeof others, &others);
        }
    }
    void release() {
        for (int i = 0; i < count_; ++i)
            if (moved_[i]) sched_setaffinity(threads_[i], sizeof cores_[i], &cores_[i]);
    }

private:
    int count_ = 0, threads_[kMost];
    bool moved_[kMost];
    cpu_set_t cores_[kMost];
};

// A call as a parallel region.
struct Region {
    Slot& slot;
    const Job& job;
    uint64_t ticket;
    pthread_t caller;
    // Portions that the caller ran, and the time when none were left to claim.
    uint32_t done;
    int64_t none_left;
    // Arrival time of the first other thread, or 0; how many arrived, and their numbers.
    std::atomic<int64_t> joined;
    std::atomic<int> others;
    std::atomic<int> who[Sleepers::kMost];

    static void run(void* self) {
        Region& r = *static_cast<Region*>(self);
        if (!pthread_equal(r.caller, pthread_self())) {
            int64_t nobody = 0;
            r.joined.compare_exchange_strong(nobody, now_ns(), relaxed);
            static thread_local const int own_number = current_thread();
            const int place = r.others.fetch_add(1, relaxed);
            if (place < Sleepers::kMost) r.who[place].store(own_number, relaxed);
            help(r.slot);
            return;
        }
        r.done = run_portions(r.slot, r.job, r.ticket, 0);
        r.none_left = now_ns();
    }
};

// Runs the filling in a parallel region; returns the number of portions that the caller ran. OpenMP
// ends threads that a region has less than the one before, so all regions have the same number.
uint32_t run_portions_in_region(Slot& slot, const Job& job, uint64_t ticket, int threads) {
    static thread_local Sleepers sleepers;
    Region region = {slot, job, ticket, pthread_self(), 0, 0, {0}, {0}, {}};
    const int64_t start = now_ns();
    const bool is_after_pause = start - last_end.load(relaxed) > kPause;
    if (is_after_pause) sleepers.avoid_this_core();
    openmp()(Region::run, &region, static_cast<unsigned>(threads), 0);
    if (is_after_pause) sleepers.release();
    sleepers.know(region.who, region.others.load(relaxed));
    const int64_t end = now_ns();
    // Others may still be running their last portion, for as long as one takes.
    const int64_t portion = region.done ? (region.none_left - start) / region.done : end - start;
    const int64_t waited = end - region.none_left - 2 * portion - kWakes;
    const int64_t forgiven = (region.none_left - start) / kForgiven;
    const int64_t more = std::clamp<int64_t>(waited, 0, kMostLost) - forgiven;
    const int64_t sum = std::max<int64_t>(0, lost.load(relaxed) + more);
    lost.store(sum, relaxed);
    if (start - last_end.exchange(end, relaxed) < kSoon) {
        const int change = region.joined.load(relaxed) - start > kLate ? 1 : -1;
        late.store(std::max(0, late.load(relaxed) + change), relaxed);
    }
    if (sum > kBusy || late.load(relaxed) > kMostLate) become_busy(end, sum > kBusy);
    return region.done;
}

Slot* take_slot() {
    for (Slot& slot : slots)
        if (!slot.taken.load(relaxed) && !slot.taken.exchange(true, std::memory_order_acquire))
            return &slot;
    return nullptr;
}

// A forked child has none of the other threads; resets what they left.
void begin_forked_child() {
    for (Slot& slot : slots) {
        slot.taken = false;
        slot.ticket = filling_of(slot.ticket) * kFilling;
    }
    for (Worker& worker : all_workers) worker.thread = 0;
    workers = sleeping = listening = 0;
    // An OpenMP region in a thread that had one before the fork would wait forever.
    busy = true;
    busy_until = INT64_MAX;
}

}  // namespace
}  // namespace ece408

void ece408_parallel_for(int threads, int64_t count, ece408_chunks* body, const void* work) {
    using namespace ece408;
    const int most = std::min(threads, kMostThreads);
    threads = static_cast<int>(std::min<int64_t>(most, count));
    Slot* const slot = threads > 1 ? take_slot() : nullptr;
    if (!slot) return body(work, 0, count, 0);
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] { pthread_atfork(nullptr, nullptr, begin_forked_child); });
    const Job job = {body, work, count, count < kMostPortions ? count : kMostPortions, threads};
    const uint64_t ticket = slot->fill(job);
    uint32_t done;
    if (is_region_due()) {
        done = run_portions_in_region(*slot, job, ticket, most);
    } else {
        ensure_workers(threads - 1);
        ring(threads - 1);
        done = run_portions(*slot, job, ticket, 0);
    }
    if (slot->unfinished.fetch_sub(done, std::memory_order_acq_rel) != done)
        wait_for_others(*slot);
    slot->taken.store(false, std::memory_order_release);
}

void ece408_use_workers(int threads) {
    using namespace ece408;
    uses_workers = threads > 0;
    if (threads < 2) return;
    expected_until.store(spin_end(), relaxed);
    const int helpers = std::min(threads, kMostThreads) - 1;
    ensure_workers(helpers);
    ring(helpers);
}
