// Pages of large arrays that are about to be written for the first time.
#pragma once
#include <stdint.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

// Advises the kernel to use huge pages for an array's missing pages; existing ones stay. With pages
// of 4 KiB, a fresh array's page faults take longer than a layer of few channels. A system without
// huge pages refuses, which does no harm.
inline void ask_for_huge_pages(void* address, int64_t nbytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // From this size on the system call is worth its time.
    constexpr int64_t kLarge = 8 << 20;
    if (nbytes < kLarge) return;
    static const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t first = reinterpret_cast<intptr_t>(address);
    const int64_t begin = (first + page - 1) / page * page;
    const int64_t end = (first + nbytes) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address, (void)nbytes;
#endif
}

}  // namespace
