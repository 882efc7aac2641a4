// Counts of the warps' work at each place of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "include/emulated.h"

namespace ece408_emulator {

// ece408_op/backends/emulator/counts.py has the same numbers and the words for them.
enum class What : int32_t { CODE, GLOBAL_LOAD, GLOBAL_STORE, SHARED_LOAD, SHARED_STORE, ATOMIC, BARRIER };

// Of one place: the executions by warps, their active lanes and existing lanes; sectors of 32 bytes
// or passes over shared memory's banks; and the passes that bank conflicts repeat.
struct Count {
    What what;
    int32_t line;      // 0: `place` has the line
    const char* file;  // null: `place` has the file
    uint64_t place;    // offset of the return address in the library
    uint64_t warps, lanes, possible_lanes, sectors, passes, conflicts;
    char kernel[96];
};

// The launches of a function with one size.
struct Launched {
    char kernel[96];
    uint32_t grid[3], block[3];
    uint64_t static_shared, dynamic_shared, count;
};

// Counts of one worker's warps; the lanes of a step run the same code, one after the other.
class Counts {
public:
    void begin_lane(uint32_t lane) {
        lane_ = lane;
        next_ = 0;
    }
    // An access of the current lane; `is_shared` memory is that of its block.
    void access(Site site, What what, const void* address, size_t bytes);
    // All lanes of the step have run; `active` of the `exist` lanes took part.
    void end_step(unsigned active, unsigned exist, Site code);
    void add_barrier(Place place, unsigned lanes, unsigned exist);
    // Hands over the counts of a kernel in the library at this address.
    void give(const char* kernel, uintptr_t library);

private:
    struct Access {
        Site site;
        What what;
        uint32_t bytes;
        unsigned lanes;
        uintptr_t addresses[32];
    };
    struct Key {
        Site site;
        What what;
        bool operator==(const Key& other) const { return site == other.site && what == other.what; }
    };
    struct Hash {
        size_t operator()(const Key& key) const {
            const auto address = reinterpret_cast<uintptr_t>(key.site.address);
            const auto file = reinterpret_cast<uintptr_t>(key.site.place.file);
            return (address ^ file * 31 ^ static_cast<uintptr_t>(key.site.place.line) << 8) * 7 +
                   static_cast<size_t>(key.what);
        }
    };
    Count& total(Site site, What what) { return totals_[{site, what}]; }
    void add(const Access& access, unsigned exist);

    uint32_t lane_ = 0;
    size_t next_ = 0, used_ = 0;
    std::vector<Access> accesses_;
    std::unordered_map<Key, Count, Hash> totals_;
};

void note_launch(const char* kernel, dim3 grid, dim3 block, size_t static_shared,
                 size_t dynamic_shared);

}  // namespace ece408_emulator
