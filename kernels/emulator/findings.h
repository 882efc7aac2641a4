// What the checks found, for whoever asks afterwards.
#pragma once

#include <cstddef>
#include <cstdint>

#include "include/emulated.h"

namespace ece408_emulator {

// ece408_op/backends/emulator/findings.py has the same numbers and the words for them.
enum class Kind : int32_t {
    OUT_OF_BOUNDS_READ,
    OUT_OF_BOUNDS_WRITE,
    FREED_READ,
    FREED_WRITE,
    MISALIGNED,
    NEVER_WRITTEN,
    RACE_IN_BLOCK,
    RACE_BETWEEN_BLOCKS,
    BARRIER_NOT_REACHED,
    BARRIERS_DIFFER,
    WRONG_MASK,
    DEADLOCK,
    OUT_OF_ARRAY,
    UNKNOWN_MEMORY,
    TRAP,
};

struct Finding {
    Kind kind;
    int32_t line;          // 0: where `place` says
    const char* file;      // null: where `place` says
    uint64_t place;        // offset of the return address in the library
    uint32_t block[3], thread[3];
    uint64_t count;
    uint64_t bytes;        // that were touched
    char text[192];        // more about it
    char kernel[96];
};

// Of the current thread, at a place in the source or before a return address.
void note(Kind kind, Place place, size_t bytes, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
void note(Kind kind, const void* address, size_t bytes, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

}  // namespace ece408_emulator
