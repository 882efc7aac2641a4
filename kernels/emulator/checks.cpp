// Hooks that the compiler calls before each access to memory (-fsanitize=thread, gcc/tsan.cc), for
// each index beyond an array (-fsanitize=bounds) and before each basic block
// (-fsanitize-coverage=trace-pc): checks and counts instead of their libraries.

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include "findings.h"
#include "include/errors.h"
#include "runtime.h"

namespace ece408_emulator {
namespace {

// A GPU has no memory at this distance from any allocation: it maps pages of this size.
constexpr size_t MAPPED = 2 << 20;

[[gnu::noinline]] void describe(char* text, size_t room, const void* address) {
    const Memory& memory = emulator().memory;
    size_t begin = 0;
    const Memory::Allocation* const found = memory.nearest(address, &begin);
    if (!found) {
        snprintf(text, room, "nothing is allocated");
        return;
    }
    const size_t at = memory.offset(address), end = begin + found->bytes;
    const char* const what = found->freed ? "a freed allocation" : "the nearest allocation";
    if (at >= end)
        snprintf(text, room, "%zu bytes behind %s of %zu bytes", at - end, what, found->bytes);
    else if (at < begin)
        snprintf(text, room, "%zu bytes before %s of %zu bytes", begin - at, what, found->bytes);
    else
        snprintf(text, room, "at byte %zu of %s of %zu bytes", at - begin, what, found->bytes);
}

bool is_far(const void* address) {
    const Memory& memory = emulator().memory;
    size_t begin = 0;
    const Memory::Allocation* const found = memory.nearest(address, &begin);
    if (!found) return true;
    const size_t at = memory.offset(address), end = begin + found->bytes;
    return at > end ? at - end > MAPPED : begin > at && begin - at > MAPPED;
}

template <class Where>
[[noreturn, gnu::noinline]] void illegal(const void* address, size_t size, bool writes, Where place) {
    const auto number = reinterpret_cast<uintptr_t>(address);
    note(Kind::UNKNOWN_MEMORY, place, size, "%s address 0x%zx, which is %s",
         writes ? "writes to" : "reads from", static_cast<size_t>(number),
         number < 4096 ? "a null pointer's" : "no memory of the GPU");
    worker->stop(ILLEGAL_ADDRESS);
}

template <class Where>
[[gnu::noinline]] void bad_state(const void* address, size_t size, uint8_t state, bool writes,
                                 Where place, bool is_shared) {
    if (state == NEVER_WRITTEN) {
        if (!writes && !is_known(Kind::NEVER_WRITTEN, place))
            note(Kind::NEVER_WRITTEN, place, size, "in %s memory",
                 is_shared ? "shared" : "global");
        return;
    }
    if (state == COMING) {
        if (!is_known(Kind::RACE_IN_BLOCK, place))
            note(Kind::RACE_IN_BLOCK, place, size, "%s while a copy to it has not been waited for",
                 writes ? "written" : "read");
        return;
    }
    if (!is_shared && is_far(address)) illegal(address, size, writes, place);
    const Kind kind = state == FREED ? (writes ? Kind::FREED_WRITE : Kind::FREED_READ)
                                     : (writes ? Kind::OUT_OF_BOUNDS_WRITE : Kind::OUT_OF_BOUNDS_READ);
    if (is_known(kind, place)) return;
    char text[128] = "in shared memory";
    if (!is_shared) describe(text, sizeof text, address);
    note(kind, place, size, "%s", text);
}

constexpr uint32_t IN_SOURCE = 1u << 31;

// Call sites of atomic functions, which are not return addresses.
struct Places {
    std::mutex lock;
    std::vector<Place> all;
};

Places& places() {
    static Places found;
    return found;
}

inline uint32_t where_id(const void* address) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) - worker->running().library_begin);
}

uint32_t where_id(Place place) {
    Worker& w = *worker;
    if (place != w.last_place) {
        Places& known = places();
        std::lock_guard<std::mutex> hold(known.lock);
        const auto found = std::find_if(known.all.begin(), known.all.end(),
                                        [&](const Place& each) { return !(each != place); });
        w.last_place = place;
        w.last_place_id = static_cast<uint32_t>(found - known.all.begin()) | IN_SOURCE;
        if (found == known.all.end()) known.all.push_back(place);
    }
    return w.last_place_id;
}

// The site of an operation, by its number.
Site site_of(uint32_t id, uint32_t number) {
    if (!(id & IN_SOURCE)) return reinterpret_cast<const void*>(emulator().streams.library(number) + id);
    Places& known = places();
    std::lock_guard<std::mutex> hold(known.lock);
    return known.all[id & ~IN_SOURCE];
}

// An access that is checked for races.
struct Access {
    const void* address;
    size_t size;
    bool is_shared;
};

void race_of_streams(uint32_t before, uint32_t before_at, bool before_writes, bool writes, size_t size,
                     Site site) {
    if (is_known(Kind::RACE_BETWEEN_STREAMS, site)) return;
    note_pair(Kind::RACE_BETWEEN_STREAMS, site, site_of(before_at, before), size,
              "%s here, and %s at {} on another stream, with no event or synchronisation between",
              writes ? "written" : "read", before_writes ? "written" : "read");
}

[[gnu::noinline]] void race(Tag before, uint32_t before_at, bool before_writes, bool writes,
                            const Access& access, Site site) {
    const Worker& w = *worker;
    const uint32_t number = launch_of(before);
    if (number != launch_of(w.own_tag()))
        return race_of_streams(number, before_at, before_writes, writes, access.size, site);
    const bool is_own = block_of(before) == w.block();
    if (is_known(is_own ? Kind::RACE_IN_BLOCK : Kind::RACE_BETWEEN_BLOCKS, site)) return;
    const char* const did = before_writes ? "written" : "read";
    const char* const does = writes ? "written" : "read";
    const char* const where = access.is_shared ? "shared" : "global";
    const Site other = site_of(before_at, number);
    if (!is_own) {
        note_pair(Kind::RACE_BETWEEN_BLOCKS, site, other, access.size,
                  "%s here, and %s by another block at {}, in %s memory", does, did, where);
        return;
    }
    char who[64] = "other threads";
    const uint32_t thread = thread_of(before);
    const dim3& b = w.running().block;
    if (thread == BY_ATOMIC)
        snprintf(who, sizeof who, "an atomic function");
    else if (thread < SOME_LANES)
        snprintf(who, sizeof who, "thread (%u,%u,%u)", thread % b.x, thread / b.x % b.y, thread / b.x / b.y);
    note_pair(Kind::RACE_IN_BLOCK, site, other, access.size,
              "%s here, and %s by %s at {}, with no barrier between, in %s memory", does, did, who, where);
}

// Another block's accesses to shared memory never conflict. `lanes` are those of a tag of
// SOME_LANES.
inline bool conflicts(Tag before, Tag own, uint32_t lanes, bool is_shared) {
    const Tag difference = before ^ own;
    if (is_shared) {
        if (difference >> (CLOCK_BITS + THREAD_BITS)) return false;
    } else if (difference >> LAUNCH_AT) {
        return worker->on_other_stream(before);
    }
    // Not the same thread.
    return difference >> CLOCK_BITS && !worker->ordered(before, lanes);
}

constexpr bool same_block(Tag a, Tag b) { return !((a ^ b) >> (CLOCK_BITS + THREAD_BITS)); }
constexpr Tag with_thread(Tag t, uint32_t thread) {
    return (t & ~(Tag{0xFFF} << CLOCK_BITS)) | Tag{thread} << CLOCK_BITS;
}

// The tag to keep after two reads in this launch and block: both threads, unless one read is known
// to come before the other.
[[gnu::noinline]] Tag both_of_block(Touched& touched, Tag before, Tag own) {
    const uint32_t thread = thread_of(own), other = thread_of(before), warp = thread / LANES;
    if (thread == other) return own;
    const Tag many = with_thread(own, MANY_THREADS);
    uint32_t lanes = touched.lanes.load(std::memory_order_relaxed);
    if (other < SOME_LANES && other / LANES == warp)
        lanes = 1u << other % LANES;
    else if (other != SOME_LANES + warp)
        return worker->ordered(before, lanes) ? own : many;
    lanes = worker->unordered(before, lanes) & ~(1u << thread % LANES);
    if (!lanes) return own;
    touched.lanes.store(lanes | 1u << thread % LANES, std::memory_order_relaxed);
    const Tag last = clock_of(before) > clock_of(own) ? before : own;
    return with_thread(last, SOME_LANES + warp);
}

// After two reads by operations that may overlap.
[[gnu::noinline]] Tag both_of_streams(Tag before, Tag own) {
    static std::mutex lock;
    Emulator& e = emulator();
    const uint32_t first = launch_of(before), second = launch_of(own);
    if (e.streams.includes(first, second)) return before;
    std::lock_guard<std::mutex> hold(lock);
    const auto next = [] { return (emulator().operations + 1) & 0xFF ? ++emulator().operations & 0xFF : 0; };
    return tag(e.streams.both(first, second, next), MANY_BLOCKS, MANY_THREADS, 0);
}

inline Tag both(Touched& touched, Tag before, Tag own) {
    if (launch_of(before) != launch_of(own)) return worker->on_other_stream(before) ? both_of_streams(before, own) : own;
    if (block_of(before) == block_of(own)) return both_of_block(touched, before, own);
    if (worker->ordered(before, 0)) return own;
    return with_thread(own, MANY_THREADS) | Tag{MANY_BLOCKS} << 36;
}

// If an atomic function of a block follows its own plain write, that write still races with other
// blocks' atomic functions: it replaces the read, if there is none.
inline void keep_writer(Touched& touched, Tag own) {
    const Tag writer = touched.written, reader = touched.read;
    if (thread_of(writer) == BY_ATOMIC || !same_block(writer, own) || same_block(reader, own)) return;
    if (!worker->read_by_many_blocks(reader)) touched.read = both(touched, reader, writer);
    touched.read_at = touched.written_at.load(std::memory_order_relaxed);
}

// Decided by the thread's next access: whether a write changes anything.
[[gnu::always_inline]] inline void suspect(Suspect& kept, const Access& access, Site site, Tag before,
                                           uint32_t before_at, bool is_rewrite) {
    kept.address = access.address;
    kept.size = access.size;
    kept.is_shared = access.is_shared;
    kept.site = site;
    kept.before = before;
    kept.before_at = before_at;
    kept.is_rewrite = is_rewrite;
    memcpy(kept.old, access.address, access.size);
}

void report(const Suspect& each, bool writes) {
    race(each.before, each.before_at, true, writes, {each.address, each.size, each.is_shared}, each.site);
}

template <class Each>
[[gnu::always_inline]] inline void visit(const Access& access, Each each) {
    Worker& w = *worker;
    if (access.is_shared)
        w.shared_touched.visit(w.shared_offset(access.address), access.size, each);
    else
        emulator().memory.touched.visit(emulator().memory.offset(access.address), access.size, each);
}

[[gnu::noinline]] void settle_write(Worker& w) {
    w.unsettled = false;
    const Suspect& each = w.written;
    if (!memcmp(each.old, each.address, each.size)) return;
    if (!each.is_rewrite) return report(each, true);
    visit({each.address, each.size, each.is_shared},
          [](Touched& t) { t.varied.store(1, std::memory_order_relaxed); });
}

template <bool WRITES>
[[gnu::noinline]] void conflict_with_writer(const Touched& touched, Tag own, const Access& access,
                                            Site site) {
    Worker& w = *worker;
    const Tag writer = touched.written;
    const uint32_t at = touched.written_at.load(std::memory_order_relaxed);
    const bool by_atomic = thread_of(writer) == BY_ATOMIC;
    if (by_atomic && thread_of(own) == BY_ATOMIC) return;
    const bool is_small = access.size <= sizeof(Suspect::old);
    if (!WRITES && by_atomic && is_small) {
        // The first read of a loop around atomicCAS, which is harmless, or a mistake.
        if (w.read.address == access.address) return;
        settle_read(w);
        suspect(w.read, access, site, writer, at, false);
        return;
    }
    const bool may_be_same = WRITES && !by_atomic && thread_of(own) != BY_ATOMIC && is_small;
    if (!may_be_same || touched.varied.load(std::memory_order_relaxed))
        return race(writer, at, true, WRITES, access, site);
    // Writes of the same value are harmless.
    if (w.unsettled) return;
    suspect(w.written, access, site, writer, at, false);
    w.unsettled = true;
}

// `own` is the current thread's tag.
template <bool WRITES, class Where>
[[gnu::always_inline]] inline void check_race(Touched& touched, Tag own, const Access& access, Where place) {
    Worker& w = *worker;
    const Tag writer = touched.written, reader = touched.read;
    const bool by_atomic = thread_of(own) == BY_ATOMIC;
    if (writer != own) {
        if (conflicts(writer, own, 0, access.is_shared))
            conflict_with_writer<WRITES>(touched, own, access, place);
        if (WRITES) {
            if (by_atomic) keep_writer(touched, own);
            touched.written = own;
            touched.written_at.store(where_id(place), std::memory_order_relaxed);
            touched.varied.store(0, std::memory_order_relaxed);
        }
    } else if (WRITES && !by_atomic && access.size <= sizeof(Suspect::old) && !w.unsettled &&
               !touched.varied.load(std::memory_order_relaxed)) {
        suspect(w.written, access, place, 0, 0, true);
        w.unsettled = true;
    }
    if (reader == own) return;
    if (!WRITES) {
        if (w.read_by_many_blocks(reader) || reader == with_thread(own, MANY_THREADS)) return;
        const Tag now = both(touched, reader, own);
        if (now == reader) return;
        touched.read = now;
        touched.read_at.store(where_id(place), std::memory_order_relaxed);
    } else if (reader) {
        const uint32_t lanes = touched.lanes.load(std::memory_order_relaxed);
        if (!conflicts(reader, own, lanes, access.is_shared)) {
            // Accesses after this write are also after those reads.
            if (!by_atomic) touched.read = 0;
        } else if (!w.compares) {
            race(reader, touched.read_at.load(std::memory_order_relaxed), false, true, access, place);
        }
    }
}

inline bool are_written(const uint8_t* states, size_t size) {
    constexpr uint64_t ALL = 0x0101010101010101 * WRITTEN;
    uint64_t first = ALL, second = ALL;
    switch (size) {
        case 1: return *states == WRITTEN;
        case 2: memcpy(&first, states, 2); break;
        case 4: memcpy(&first, states, 4); break;
        case 8: memcpy(&first, states, 8); break;
        case 16:
            memcpy(&first, states, 8);
            memcpy(&second, states + 8, 8);
            break;
        default:
            for (size_t i = 0; i < size; ++i)
                if (states[i] != WRITTEN) return false;
    }
    return first == ALL && second == ALL;
}

// Whether the bytes may be accessed; marks written ones. For ranges that are partly unwritten.
template <bool WRITES, class Where>
[[gnu::noinline]] bool check_states(uint8_t* states, const void* address, size_t size, Where place,
                                    bool by_atomic, bool is_shared) {
    for (size_t i = 0; i < size; ++i) {
        if (states[i] == WRITTEN || (WRITES && !by_atomic && states[i] == NEVER_WRITTEN)) continue;
        bad_state(address, size, states[i], WRITES && !by_atomic, place, is_shared);
        if (states[i] != NEVER_WRITTEN) return false;
        // One report is enough.
        break;
    }
    for (size_t i = 0; i < size; ++i) states[i] = WRITTEN;
    return true;
}

// In a library, beyond its variable; the memory before all variables is constant, and unknown.
template <class Where>
[[gnu::noinline]] void check_variable(uintptr_t address, size_t size, bool writes, Where place) {
    const std::vector<Variable>& all = emulator().variables;
    auto found = std::upper_bound(all.begin(), all.end(), address,
                                  [](uintptr_t a, const Variable& v) { return a < v.begin; });
    if (found == all.begin()) return;
    --found;
    if (found->begin < worker->running().library_begin) return;
    if (address + size <= found->end) {
        worker->variable = *found;
        return;
    }
    const Kind kind = writes ? Kind::OUT_OF_BOUNDS_WRITE : Kind::OUT_OF_BOUNDS_READ;
    if (is_known(kind, place)) return;
    note(kind, place, size, "%zu bytes behind the begin of a variable of %zu bytes",
         static_cast<size_t>(address - found->begin), static_cast<size_t>(found->end - found->begin));
}

template <class Where>
[[gnu::noinline]] void unknown(uintptr_t address, size_t size, bool writes, Where place) {
    const Variable& last = worker->variable;
    if (worker->on_stack(address) || (last.begin <= address && address + size <= last.end)) return;
    const Running& running = worker->running();
    // Its constants and variables, also __constant__ and __device__ ones.
    if (running.library_begin <= address && address < running.library_end)
        check_variable(address, size, writes, place);
    else
        illegal(reinterpret_cast<const void*>(address), size, writes, place);
}

// Counts a kernel's memory access. Local arrays are mostly in registers, and constant memory has
// its own units.
[[gnu::noinline]] void count(const void* address, size_t size, bool writes, const void* place) {
    Worker& w = *worker;
    const Memory& memory = emulator().memory;
    const Site site{place};
    if (memory.offset(address) < memory.size())
        w.counts->access(site, writes ? What::GLOBAL_STORE : What::GLOBAL_LOAD, address, size);
    else if (w.shared_offset(address) < SHARED_REGION)
        w.counts->access(site, writes ? What::SHARED_STORE : What::SHARED_LOAD, address, size);
}

template <class Where>
[[gnu::noinline]] void misaligned(uintptr_t address, size_t size, Where place) {
    note(Kind::MISALIGNED, place, size, "address 0x%zx is no multiple of %zu",
         static_cast<size_t>(address), size);
    worker->stop(MISALIGNED_ADDRESS);
}

// In memory whose bytes at `at` have these states.
template <bool WRITES, class Where>
[[gnu::always_inline]] inline void check_in(Shadow& shadow, uint8_t* states, size_t at, const Access& access,
                                            bool by_atomic, Where place) {
    if (!are_written(states, access.size) &&
        !check_states<WRITES>(states, access.address, access.size, place, by_atomic, access.is_shared))
        return;
    const Tag current = worker->own_tag(), own = by_atomic ? with_thread(current, BY_ATOMIC) : current;
    shadow.visit(at, access.size, [&](Touched& each) __attribute__((always_inline)) {
        check_race<WRITES>(each, own, access, place);
    });
}

// A kernel's memory access, before it happens.
template <bool WRITES, class Where>
[[gnu::always_inline]] inline void check(const void* pointer, size_t size, bool aligned, bool by_atomic,
                                         Where place) {
    Worker& w = *worker;
    if (__builtin_expect(w.unsettled, false)) settle_write(w);
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (aligned && address & (size - 1)) misaligned(address, size, place);
    Memory& memory = emulator().memory;
    const size_t at = memory.offset(pointer), offset = w.shared_offset(pointer);
    if (at < memory.size())
        check_in<WRITES>(memory.touched, memory.states(at), at, {pointer, size, false}, by_atomic, place);
    else if (offset < SHARED_REGION)
        check_in<WRITES>(w.shared_touched, w.shared_states + offset, offset, {pointer, size, true},
                         by_atomic, place);
    else
        unknown(address, size, WRITES, place);
}

[[gnu::noinline]] void check_host_copies(const void* pointer, size_t size, bool writes, const void* place) {
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    const auto alone = emulator().alone();
    const Streams::HostCopy* const found = emulator().streams.too_early(begin, begin + size, writes);
    if (!found || is_known(Kind::RACE_BETWEEN_STREAMS, place)) return;
    note_pair(Kind::RACE_BETWEEN_STREAMS, place, found->place, size,
              "%s here by the host, and %s by a copy at {} that has not been waited for",
              writes ? "written" : "read", found->writes ? "written" : "read");
}

// On the host, which sees another memory.
[[gnu::noinline]] void touch_by_host(const void* pointer, size_t size, bool writes, const void* place) {
    const Memory& memory = emulator().memory;
    if (!memory.checked()) return;
    if (memory.offset(pointer) >= memory.size()) {
        if (emulator().streams.copies_host()) check_host_copies(pointer, size, writes, place);
        return;
    }
    size_t begin = 0;
    const Memory::Allocation* const found = memory.nearest(pointer, &begin);
    if (found && found->managed) return;
    note(Kind::HOST_ACCESS, place, size, "%s it without cudaMemcpy", writes ? "writes" : "reads");
}

template <bool WRITES>
[[gnu::always_inline]] inline void touch(const void* pointer, size_t size, bool aligned, const void* place) {
    if (!worker) return touch_by_host(pointer, size, WRITES, place);
    if (worker->counts)
        count(pointer, size, WRITES, place);
    else if (emulator().memory.checked())
        check<WRITES>(pointer, size, aligned, false, place);
}

}  // namespace

void settle_read(Worker& w) {
    if (!w.read.address) return;
    report(w.read, false);
    w.read.address = nullptr;
}

void settle(Worker& w) {
    if (w.unsettled) settle_write(w);
    settle_read(w);
}

Transfer::Transfer(cudaStream_t stream, const void* place) : alone_(emulator().alone()), place_(place) {
    Emulator& e = emulator();
    if (!e.streams.are_several() || !e.memory.checked()) return;
    number_ = e.next_operation() & 0xFF;
    const uintptr_t library = library_of(place).first;
    at_ = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(place) - library);
    unordered_ = e.streams.begin(stream, number_, library);
}

void Transfer::touch(const void* address, size_t bytes, bool writes) {
    Memory& memory = emulator().memory;
    if (!number_ || !memory.holds(address, bytes)) return;
    const Tag own = tag(number_, 0, 0, 1);
    const auto is_beside = [&](Tag before) { return unordered_ && unordered_[launch_of(before)]; };
    const auto check = [&](Tag before, uint32_t at, bool wrote) {
        if (is_beside(before)) race_of_streams(launch_of(before), at, wrote, writes, bytes, place_);
    };
    memory.touched.visit(memory.offset(address), bytes, [&](Touched& each) {
        check(each.written, each.written_at, true);
        if (writes) {
            check(each.read, each.read_at, false);
            each.written = own;
            each.written_at = at_;
            each.varied = 0;
            each.read = 0;
        } else {
            each.read = is_beside(each.read) ? both_of_streams(each.read, own) : own;
            each.read_at = at_;
        }
    });
}

void begin_copy(void* shared, size_t bytes) {
    if (!worker || worker->counts || !emulator().memory.checked()) return;
    memset(worker->shared_states + worker->shared_offset(shared), COMING, bytes);
    Copies& copies = worker->copies();
    copies.begun.push_back({shared, bytes, copies.groups});
}

void commit_copies() {
    if (worker) ++worker->copies().groups;
}

void wait_for_copies(size_t but) {
    if (!worker) return;
    Worker& w = *worker;
    Copies& copies = w.copies();
    const auto is_over = [&](const Copies::Copy& each) { return each.group + but < copies.groups; };
    const auto end = std::stable_partition(copies.begun.begin(), copies.begun.end(), is_over);
    for (auto each = copies.begun.begin(); each != end; ++each) {
        memset(w.shared_states + w.shared_offset(each->to), WRITTEN, each->bytes);
        // As if written now.
        visit({each->to, each->bytes, true}, [&](Touched& unit) { unit.written = w.own_tag(); });
    }
    copies.begun.erase(copies.begun.begin(), end);
}

void fail_assertion(Place place, const char* text) {
    if (!worker) {
        fprintf(stderr, "%s:%d: assertion `%s' failed\n", place.file, place.line, text);
        abort();
    }
    note(Kind::TRAP, place, 0, "assertion `%s' failed", text);
    worker->stop(ASSERTED);
}

void atomic(Place place, const void* address, size_t bytes, bool may_spin, bool compares) {
    if (!worker) return;
    Worker& w = *worker;
    if (w.counts) {
        w.counts->access({place}, What::ATOMIC, address, bytes);
        return;
    }
    const bool is_checked = emulator().memory.checked();
    if (is_checked) {
        if (compares && w.read.address == address) {
            w.read.address = nullptr;
            const Tag own = w.own_tag();
            visit({address, bytes, emulator().memory.offset(address) >= emulator().memory.size()},
                  [&](Touched& each) { if (each.read == own) each.read = 0; });
        }
        w.compares = compares;
        check<true>(address, bytes, true, true, place);
        w.compares = false;
    }
    if (may_spin) w.spin(address, bytes, place, nullptr);
    // Others may have run, and released what the function now acquires.
    if (is_checked) w.synchronize();
}

}  // namespace ece408_emulator

using namespace ece408_emulator;

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define PLACE __builtin_return_address(0)

// The variables of the library from dlopen, by address and size.
EXPORTED void ece408_emulator_variables(void* library, const uint64_t (*pairs)[2], int count) {
    const link_map* map = nullptr;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map)) return;
    std::lock_guard<std::mutex> alone(emulator().running);
    std::vector<Variable>& all = emulator().variables;
    for (int i = 0; i < count; ++i) {
        const uintptr_t begin = map->l_addr + pairs[i][0];
        all.push_back({begin, begin + pairs[i][1]});
    }
    std::sort(all.begin(), all.end(),
              [](const Variable& a, const Variable& b) { return a.begin < b.begin; });
}

// The size of the variable at an address; larger than any if unknown.
EXPORTED size_t ece408_emulator_room(const void* symbol) {
    const auto alone = emulator().alone();
    for (const Variable& each : emulator().variables)
        if (each.begin == reinterpret_cast<uintptr_t>(symbol)) return each.end - each.begin;
    return SIZE_MAX;
}

// The compiler's names.
extern "C" {

#define HOOKS(size)                                                                              \
    void __tsan_read##size(void* a) { touch<false>(a, size, true, PLACE); } \
    void __tsan_write##size(void* a) { touch<true>(a, size, true, PLACE); } \
    void __tsan_unaligned_read##size(void* a) { touch<false>(a, size, false, PLACE); } \
    void __tsan_unaligned_write##size(void* a) { touch<true>(a, size, false, PLACE); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

// A volatile variable: a loop may read it until another thread writes it.
#define VOLATILE_HOOKS(size)                                                                     \
    void __tsan_volatile_read##size(void* a) {                                                   \
        touch<false>(a, size, true, PLACE);                                                      \
        if (worker) worker->spin(a, size, {}, PLACE);                                            \
    }                                                                                            \
    void __tsan_volatile_write##size(void* a) { touch<true>(a, size, true, PLACE); } \
    void __tsan_unaligned_volatile_read##size(void* a) { touch<false>(a, size, false, PLACE); } \
    void __tsan_unaligned_volatile_write##size(void* a) { touch<true>(a, size, false, PLACE); }
VOLATILE_HOOKS(1)
VOLATILE_HOOKS(2)
VOLATILE_HOOKS(4)
VOLATILE_HOOKS(8)
VOLATILE_HOOKS(16)

void __tsan_read_range(void* a, unsigned long size) {
    touch<false>(a, size, false, PLACE);
}
void __tsan_write_range(void* a, unsigned long size) {
    touch<true>(a, size, false, PLACE);
}
void __sanitizer_cov_trace_pc() {
    if (worker && worker->counts) worker->begin_code(PLACE, __builtin_frame_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Replacements of the C library's functions, by the linker (--wrap).
#define COPY(name)                                                                               \
    __attribute__((visibility("default"))) void* __wrap_##name(void* to, const void* from, size_t size) { \
        if (!worker && size) {                                                                   \
            touch_by_host(from, size, false, PLACE);                                             \
            touch_by_host(to, size, true, PLACE);                                                \
        }                                                                                        \
        return name(to, from, size);                                                             \
    }
COPY(memcpy)
COPY(memmove)
__attribute__((visibility("default"))) void* __wrap_memset(void* to, int value, size_t size) {
    if (!worker && size) touch_by_host(to, size, true, PLACE);
    return memset(to, value, size);
}

struct OutOfBounds {
    const char* file;
    uint32_t line, column;
};
void __ubsan_handle_out_of_bounds(OutOfBounds* where, uintptr_t index) {
    if (worker)
        note(Kind::OUT_OF_ARRAY, Place{where->file, static_cast<int>(where->line)}, 0, "index %zd", static_cast<ssize_t>(index));
}

}  // extern "C"
