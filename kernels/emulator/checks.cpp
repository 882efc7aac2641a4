// What the compiler calls before each access to memory (-fsanitize=thread, gcc/tsan.cc), for each
// index beyond an array (-fsanitize=bounds) and before each piece of code without branches
// (-fsanitize-coverage=trace-pc): checks and counts in the place of their libraries.

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

// So many places are told apart.
constexpr size_t MOST_FINDINGS = 256;

// So far from any allocation a GPU has no memory: it maps pages of this size.
constexpr size_t MAPPED = 2 << 20;

struct Findings {
    // By place and kind, in a table of which the first free entry is taken.
    struct Known {
        std::atomic<uintptr_t> key{0};
        std::atomic<uint64_t> count{0};
    };
    static constexpr size_t TABLE = 1024;

    std::mutex lock;
    std::vector<Finding> all;
    std::vector<size_t> entries;
    Known known[TABLE];

    // The entry of a place and a kind, or the free one that is to be its own.
    Known& find(uintptr_t place, Kind kind) {
        const uintptr_t key = place << 8 | (static_cast<uintptr_t>(kind) + 1);
        for (size_t i = key * 0x9E3779B97F4A7C15u >> 54;; i = (i + 1) % TABLE) {
            const uintptr_t found = known[i].key.load(std::memory_order_acquire);
            if (found == key || !found) return known[i];
        }
    }
};

Findings& findings() {
    static Findings found;
    return found;
}

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

struct Searched {
    uintptr_t address, begin, end;
};

int look_at(dl_phdr_info* info, size_t, void* data) {
    Searched& searched = *static_cast<Searched*>(data);
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_LOAD) continue;
        begin = std::min<uintptr_t>(begin, info->dlpi_addr + header.p_vaddr);
        end = std::max<uintptr_t>(end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    if (searched.address < begin || searched.address >= end) return 0;
    searched.begin = begin;
    searched.end = end;
    return 1;
}

uintptr_t key_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }
uintptr_t key_of(Place place) { return key_of(place.file) + static_cast<uintptr_t>(place.line); }

// Whether this was found before at this place; then it is counted.
template <class Where>
bool is_known(Kind kind, Where place) {
    Findings::Known& found = findings().find(key_of(place), kind);
    if (!found.key.load(std::memory_order_relaxed)) return false;
    found.count.fetch_add(1, std::memory_order_relaxed);
    return true;
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
    if (!is_shared && is_far(address)) illegal(address, size, writes, place);
    const Kind kind = state == FREED ? (writes ? Kind::FREED_WRITE : Kind::FREED_READ)
                                     : (writes ? Kind::OUT_OF_BOUNDS_WRITE : Kind::OUT_OF_BOUNDS_READ);
    if (is_known(kind, place)) return;
    char text[128] = "in shared memory";
    if (!is_shared) describe(text, sizeof text, address);
    note(kind, place, size, "%s", text);
}

template <class Where>
[[gnu::noinline]] void race(Tag before, bool before_writes, bool writes, size_t size, Where place,
                            const char* where) {
    const Worker& w = *worker;
    const bool is_own = block_of(before) == w.block();
    if (is_known(is_own ? Kind::RACE_IN_BLOCK : Kind::RACE_BETWEEN_BLOCKS, place)) return;
    const char* const did = before_writes ? "written" : "read";
    const char* const does = writes ? "written" : "read";
    if (!is_own) {
        note(Kind::RACE_BETWEEN_BLOCKS, place, size,
             "%s here, and %s by another block, in %s memory", does, did, where);
        return;
    }
    const uint32_t thread = thread_of(before);
    if (thread >= BY_ATOMIC) {
        note(Kind::RACE_IN_BLOCK, place, size,
             "%s here, and %s by %s, with no barrier between, in %s memory", does, did,
             thread == BY_ATOMIC ? "an atomic function" : "other threads", where);
        return;
    }
    const dim3& b = w.running().block;
    note(Kind::RACE_IN_BLOCK, place, size,
         "%s here, and %s by thread (%u,%u,%u), with no barrier between, in %s memory", does, did,
         thread % b.x, thread / b.x % b.y, thread / b.x / b.y, where);
}

// The tag of a read after another read: of both.
inline Tag both(Tag before, Tag own) {
    if (before >> 56 != own >> 56) return own;
    if (block_of(before) == MANY_BLOCKS) return before;
    const Tag many = own | Tag{MANY_THREADS} << 24;
    if (block_of(before) != block_of(own)) return many | Tag{MANY_BLOCKS} << 36;
    if (thread_of(before) == thread_of(own)) return own;
    return clock_of(before) != clock_of(own) && worker->ordered(before) ? own : many;
}

// Shared memory that another block has touched is another block's.
inline bool conflicts(Tag before, Tag own, bool is_shared) {
    const Tag difference = before ^ own;
    const int other = is_shared ? CLOCK_BITS + THREAD_BITS : CLOCK_BITS + THREAD_BITS + BLOCK_BITS;
    // Not in another launch, and not the same thread.
    return !(difference >> other) && difference >> CLOCK_BITS && !worker->ordered(before);
}

constexpr bool same_block(Tag a, Tag b) { return !((a ^ b) >> (CLOCK_BITS + THREAD_BITS)); }

// Where an atomic function of a block follows its own plain write, that write still races with
// other blocks' atomic functions: it stands in the place of a read, if there is none.
template <class Word>
inline void keep_writer(Tag writer, Tag reader, Word& read, Tag own) {
    if (thread_of(writer) != BY_ATOMIC && same_block(writer, own) && !same_block(reader, own))
        read = both(reader, writer);
}

// `written` and `read` are of one word; the current thread's tag is `own`.
template <bool WRITES, class Word, class Where>
inline void check_race(Word& written, Word& read, Tag own, size_t size, Where place,
                       bool is_shared) {
    const Tag writer = written, reader = read;
    const char* const where = is_shared ? "shared" : "global";
    if (writer != own) {
        if (conflicts(writer, own, is_shared) && (thread_of(writer) != BY_ATOMIC || thread_of(own) != BY_ATOMIC))
            race(writer, true, WRITES, size, place, where);
        if (WRITES && thread_of(own) == BY_ATOMIC) keep_writer(writer, reader, read, own);
        if (WRITES) written = own;
    }
    if (reader == own) return;
    if (!WRITES)
        read = both(reader, own);
    else if (conflicts(reader, own, is_shared))
        race(reader, false, true, size, place, where);
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

// Whether the bytes may be touched; those that are written become so. For those that are not all
// written yet.
template <bool WRITES, class Where>
[[gnu::noinline]] bool check_states(uint8_t* states, const void* address, size_t size, Where place,
                                    bool by_atomic, bool is_shared) {
    for (size_t i = 0; i < size; ++i) {
        if (states[i] == WRITTEN || (WRITES && !by_atomic && states[i] == NEVER_WRITTEN)) continue;
        bad_state(address, size, states[i], WRITES && !by_atomic, place, is_shared);
        if (states[i] != NEVER_WRITTEN) return false;
        // Once is enough.
        break;
    }
    for (size_t i = 0; i < size; ++i) states[i] = WRITTEN;
    return true;
}

// In a library, beyond its variable; what lies before all variables is constant, and unknown.
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
    // Its constants and variables, __constant__ and __device__ ones too.
    if (running.library_begin <= address && address < running.library_end)
        check_variable(address, size, writes, place);
    else
        illegal(reinterpret_cast<const void*>(address), size, writes, place);
}

// What a kernel does with memory where it is counted. Local arrays are in registers, mostly, and
// constant memory has units of its own.
[[gnu::noinline]] void count(const void* address, size_t size, bool writes, const void* place) {
    Worker& w = *worker;
    const Memory& memory = emulator().memory;
    const Site site{place, {nullptr, 0}};
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

// What a kernel does with memory, before it does; `thread` is the current one, or BY_ATOMIC.
template <bool WRITES, class Where>
[[gnu::always_inline]] inline void check(const void* pointer, size_t size, bool aligned,
                                         uint32_t thread, Where place) {
    Worker& w = *worker;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (aligned && address & (size - 1)) misaligned(address, size, place);
    Memory& memory = emulator().memory;
    const size_t at = memory.offset(pointer);
    if (at < memory.size()) {
        if (!are_written(memory.states(at), size) &&
            !check_states<WRITES>(memory.states(at), pointer, size, place, thread == BY_ATOMIC, false))
            return;
        const Tag own = w.own_tag(thread);
        // Parts of a word may be of several threads.
        for (size_t i = at; i + 4 <= at + size; i += 4) {
            Touched& each = memory.touched(i);
            check_race<WRITES>(each.written, each.read, own, size, place, false);
        }
        return;
    }
    const size_t offset = w.shared_offset(pointer);
    if (offset < SHARED_REGION) {
        if (!are_written(w.shared_states + offset, size) &&
            !check_states<WRITES>(w.shared_states + offset, pointer, size, place, thread == BY_ATOMIC, true))
            return;
        const Tag own = w.own_tag(thread);
        for (size_t i = offset / 2; i < (offset + size + 1) / 2; ++i)
            check_race<WRITES>(w.shared_written[i], w.shared_read[i], own, size, place, true);
        return;
    }
    unknown(address, size, WRITES, place);
}

template <bool WRITES>
[[gnu::always_inline]] inline void touch(const void* pointer, size_t size, bool aligned, const void* place) {
    if (!worker) return;
    if (worker->counts)
        count(pointer, size, WRITES, place);
    else if (emulator().memory.checked())
        check<WRITES>(pointer, size, aligned, worker->current(), place);
}

void note(Kind kind, Place place, const void* address, size_t bytes, const char* format,
          va_list values) {
    Findings& found = findings();
    std::lock_guard<std::mutex> hold(found.lock);
    const uintptr_t key = address ? key_of(address) : key_of(place);
    Findings::Known& known = found.find(key, kind);
    known.count.fetch_add(1, std::memory_order_relaxed);
    if (known.key.load() || found.all.size() == MOST_FINDINGS) return;
    found.entries.push_back(&known - found.known);
    Finding each{};
    each.kind = kind;
    each.file = place.file;
    each.line = place.line;
    if (address) each.place = reinterpret_cast<uintptr_t>(address) - library_of(address).first;
    each.bytes = bytes;
    if (worker) {
        const uint32_t block[] = {blockIdx.x, blockIdx.y, blockIdx.z};
        const uint32_t thread[] = {threadIdx.x, threadIdx.y, threadIdx.z};
        memcpy(each.block, block, sizeof block);
        memcpy(each.thread, thread, sizeof thread);
        snprintf(each.kernel, sizeof each.kernel, "%s", worker->running().name);
    }
    vsnprintf(each.text, sizeof each.text, format, values);
    found.all.push_back(each);
    known.key.store(key << 8 | (static_cast<uintptr_t>(kind) + 1), std::memory_order_release);
}

}  // namespace

std::pair<uintptr_t, uintptr_t> library_of(const void* address) {
    Searched searched{reinterpret_cast<uintptr_t>(address), 0, 0};
    dl_iterate_phdr(look_at, &searched);
    return {searched.begin, searched.end};
}

void note(Kind kind, Place place, size_t bytes, const char* format, ...) {
    va_list values;
    va_start(values, format);
    note(kind, place, nullptr, bytes, format, values);
    va_end(values);
}

void note(Kind kind, const void* address, size_t bytes, const char* format, ...) {
    va_list values;
    va_start(values, format);
    note(kind, Place{nullptr, 0}, address, bytes, format, values);
    va_end(values);
}

void fail_assertion(Place place, const char* text) {
    if (!worker) {
        fprintf(stderr, "%s:%d: assertion `%s' failed\n", place.file, place.line, text);
        abort();
    }
    note(Kind::TRAP, place, 0, "assertion `%s' failed", text);
    worker->stop(ASSERTED);
}

void atomic(Place place, const void* address, size_t bytes, bool may_spin) {
    if (!worker) return;
    if (worker->counts) {
        worker->counts->access({nullptr, place}, What::ATOMIC, address, bytes);
        return;
    }
    if (emulator().memory.checked()) {
        check<true>(address, bytes, true, BY_ATOMIC, place);
        worker->acquired = true;
    }
    if (may_spin) worker->spin(address, bytes, place, nullptr);
}

}  // namespace ece408_emulator

using namespace ece408_emulator;

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define PLACE __builtin_return_address(0)

// How many findings there are; as many as there is room for are copied.
EXPORTED int ece408_emulator_findings(Finding* to, int room) {
    Findings& found = findings();
    std::lock_guard<std::mutex> hold(found.lock);
    const int all = static_cast<int>(found.all.size());
    for (int i = 0; i < all && i < room; ++i) {
        to[i] = found.all[i];
        to[i].count = found.known[found.entries[i]].count;
    }
    return all;
}

EXPORTED void ece408_emulator_forget_findings() {
    Findings& found = findings();
    std::lock_guard<std::mutex> hold(found.lock);
    found.all.clear();
    found.entries.clear();
    for (Findings::Known& each : found.known) each.key = 0, each.count = 0;
}

// The variables of the library that dlopen gave, each by its address there and its bytes.
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

// Of a volatile variable, which a loop may read until another thread has written it.
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

struct OutOfBounds {
    const char* file;
    uint32_t line, column;
};
void __ubsan_handle_out_of_bounds(OutOfBounds* where, uintptr_t index) {
    if (worker)
        note(Kind::OUT_OF_ARRAY, Place{where->file, static_cast<int>(where->line)}, 0, "index %zd", static_cast<ssize_t>(index));
}

}  // extern "C"
