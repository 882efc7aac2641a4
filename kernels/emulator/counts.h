// What warps do at each place of a kernel, for whoever asks afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "include/emulated.h"

namespace ece408_emulator {

// ece408_op/backends/emulator/counts.py has the same numbers and the words for them.
enum class What : int32_t { CODE, GLOBAL_LOAD, GLOBAL_STORE, SHARED_LOAD, SHARED_STORE, ATOMIC, BARRIER };

// Of one place: how often a warp came there, with how many of its lanes, of how many that it has;
// what its memory did for it: sectors of 32 bytes, or passes over shared memory's banks, and how
// many passes are repeats for bank conflicts.
struct Count {
    What what;
    int32_t line;      // 0: where `place` says
    const char* file;  // null: where `place` says
    uint64_t place;    // offset of the return address in the library
    uint64_t warps, lanes, possible_lanes, sectors, passes, conflicts;
    char kernel[96];
};

// A function's launches of one size.
struct Launched {
    char kernel[96];
    uint32_t grid[3], block[3];
    uint64_t static_shared, dynamic_shared, count;
};

// What one worker's warps do; the lanes of a step run the same code, one after the other.
class Counts {
public:
    void begin_lane(uint32_t lane) {
        lane_ = lane;
        next_ = 0;
    }
    // An access of the current lane; `is_shared` memory is that of its block.
    void access(Site site, What what, const void* address, size_t bytes);
    // All lanes of the step have run; they were `active` of those that `exist`.
    void end_step(unsigned active, unsigned exist, Site code);
    void add_barrier(Place place, unsigned lanes, unsigned exist);
    // Hand over what was counted of a kernel whose library lies there.
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
