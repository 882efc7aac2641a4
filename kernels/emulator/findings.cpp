// The table of findings: each kind at each place once, with a count.

#include "findings.h"

#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "runtime.h"

namespace ece408_emulator {
namespace {

// The maximum number of places.
constexpr size_t MOST_FINDINGS = 256;

struct Findings {
    // A hash table by place and kind with open addressing.
    struct Known {
        std::atomic<uint64_t> key{0};
        std::atomic<Finding*> finding{nullptr};
    };
    static constexpr size_t TABLE = 1024;

    // Findings that outlast the process, if they are in a file.
    struct Kept {
        uint64_t count;
        Finding all[MOST_FINDINGS];
    };
    std::mutex lock;
    Kept own{};
    Kept* kept = &own;
    Known known[TABLE];

    // The entry of a place and a kind, or the free entry for it.
    Known& find(uint64_t key) {
        for (size_t i = key * 0x9E3779B97F4A7C15u >> 54;; i = (i + 1) % TABLE) {
            const uint64_t found = known[i].key.load(std::memory_order_acquire);
            if (found == key || !found) return known[i];
        }
    }
};

Findings& findings() {
    static Findings found;
    return found;
}

uint64_t key_of(Kind kind, const Site& site) {
    const uintptr_t place = site.address ? reinterpret_cast<uintptr_t>(site.address)
                                         : reinterpret_cast<uintptr_t>(site.place.file) +
                                               static_cast<uintptr_t>(site.place.line);
    return place << 8 | (static_cast<uintptr_t>(kind) + 1);
}

void count_once_more(Finding* finding) {
    if (finding) __atomic_fetch_add(&finding->count, 1, __ATOMIC_RELAXED);
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

Spot spot_of(const Site& site) {
    Spot found{};
    found.line = site.place.line;
    const char* const file = site.place.file;
    if (file) {
        const char* const name = strrchr(file, '/');
        snprintf(found.file, sizeof found.file, "%s", name ? name + 1 : file);
    } else if (site.address) {
        found.offset =
            reinterpret_cast<uintptr_t>(site.address) - library_of(site.address).first;
    }
    return found;
}

void note(Kind kind, Site site, Site other, size_t bytes, const char* format, va_list values) {
    Findings& found = findings();
    std::lock_guard<std::mutex> hold(found.lock);
    const uint64_t key = key_of(kind, site);
    Findings::Known& known = found.find(key);
    if (known.key.load()) return count_once_more(known.finding);
    if (found.kept->count == MOST_FINDINGS) return;
    Finding& each = found.kept->all[found.kept->count];
    each = {};
    each.kind = kind;
    each.at = spot_of(site);
    each.other = spot_of(other);
    each.count = 1;
    each.bytes = bytes;
    if (worker) {
        const uint32_t block[] = {blockIdx.x, blockIdx.y, blockIdx.z};
        const uint32_t thread[] = {threadIdx.x, threadIdx.y, threadIdx.z};
        memcpy(each.block, block, sizeof block);
        memcpy(each.thread, thread, sizeof thread);
        snprintf(each.kernel, sizeof each.kernel, "%s", worker->running().name);
    }
    vsnprintf(each.text, sizeof each.text, format, values);
    ++found.kept->count;
    known.finding = &each;
    known.key.store(key, std::memory_order_release);
}

}  // namespace

std::pair<uintptr_t, uintptr_t> library_of(const void* address) {
    Searched searched{reinterpret_cast<uintptr_t>(address), 0, 0};
    dl_iterate_phdr(look_at, &searched);
    return {searched.begin, searched.end};
}

bool is_known(Kind kind, const Site& site) {
    Findings::Known& found = findings().find(key_of(kind, site));
    if (!found.key.load(std::memory_order_acquire)) return false;
    count_once_more(found.finding);
    return true;
}

void note(Kind kind, Site site, size_t bytes, const char* format, ...) {
    va_list values;
    va_start(values, format);
    note(kind, site, {}, bytes, format, values);
    va_end(values);
}

void note_pair(Kind kind, Site site, Site other, size_t bytes, const char* format, ...) {
    va_list values;
    va_start(values, format);
    note(kind, site, other, bytes, format, values);
    va_end(values);
}

}  // namespace ece408_emulator

using namespace ece408_emulator;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns the number of findings; copies as many as `to` has room for.
EXPORTED int ece408_emulator_findings(Finding* to, int room) {
    Findings& found = findings();
    std::lock_guard<std::mutex> hold(found.lock);
    const int all = static_cast<int>(found.kept->count);
    std::copy_n(found.kept->all, std::min(all, room), to);
    return all;
}

EXPORTED void ece408_emulator_forget_findings() {
    Findings& found = findings();
    std::lock_guard<std::mutex> hold(found.lock);
    found.kept->count = 0;
    for (Findings::Known& each : found.known) each.key = 0, each.finding = nullptr;
}

// Writes later findings to a file, too, for a reader after this process.
EXPORTED void ece408_emulator_keep_findings(const char* path) {
    Findings& found = findings();
    std::lock_guard<std::mutex> hold(found.lock);
    if (found.kept != &found.own || found.own.count) return;
    const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (!ftruncate(file, sizeof found.own)) {
        void* const mapped = mmap(nullptr, sizeof found.own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) found.kept = static_cast<Findings::Kept*>(mapped);
    }
    close(file);
}
