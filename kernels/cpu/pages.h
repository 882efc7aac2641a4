// What a large output costs before the first product: its pages, and room in the caches.
#pragma once

#include <stdint.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ece408 {
namespace {

// Whether so many floats are more than a core's share of the last cache, so that they will not be
// there any more when they are read.
inline bool exceeds_caches(int64_t floats) {
    return floats * static_cast<int64_t>(sizeof(float)) > int64_t{32} << 20;
}

// Asks for the pages of an array about to be written, where the system leaves that to programs,
// to be 2 MiB ones: first touch then costs one fault instead of 512. Pages there already stay.
inline void want_huge_pages(float* first, int64_t floats) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t huge = uintptr_t{2} << 20;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(first);
    const uintptr_t end = begin + static_cast<uintptr_t>(floats) * sizeof(float);
    const uintptr_t from = (begin + huge - 1) / huge * huge, to = end / huge * huge;
    // A refusal leaves the pages as they were.
    if (to < from + 4 * huge) return;
    (void)madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
    (void)first;
    (void)floats;
#endif
}

}  // namespace
}  // namespace ece408
