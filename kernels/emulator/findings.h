// Findings of the checks.
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
    FAILED_CALL,
    FAILED_FREE,
    HOST_ACCESS,
    RACE_BETWEEN_STREAMS,
};

// A place in the source: a file's name and a line; with line 0 the offset of a return address in
// the library, or no place if that is 0.
struct Spot {
    uint64_t offset;
    int32_t line;
    char file[60];
};

struct Finding {
    Kind kind;
    Spot at, other;  // `other` is a race's earlier access
    uint32_t block[3], thread[3];
    uint64_t count;
    uint64_t bytes;  // the accessed bytes
    char text[320];  // details; "{}" stands for `other`
    char kernel[96];
};

// Of the current thread.
void note(Kind kind, Site site, size_t bytes, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
void note_pair(Kind kind, Site site, Site other, size_t bytes, const char* format, ...)
    __attribute__((format(printf, 5, 6)));
// Counts a repeated finding at this place; false if it is new.
bool is_known(Kind kind, const Site& site);

}  // namespace ece408_emulator
