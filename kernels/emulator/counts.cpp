// Counts a GPU's work for lanes that run in step; Worker::run_in_step defines the order.

#include "counts.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

namespace ece408_emulator {
namespace {

constexpr uint32_t SECTOR = 32, BANKS = 32, BANK = 4;

struct All {
    std::mutex lock;
    std::vector<Count> counts;
    std::vector<Launched> launches;
};

All& all() {
    static All found;
    return found;
}

// Distinct values among at most 64.
class Distinct {
public:
    bool add(uintptr_t number) {
        for (size_t i = size; i-- > 0;)
            if (numbers_[i] == number) return false;
        numbers_[size++] = number;
        return true;
    }
    size_t size = 0;

private:
    uintptr_t numbers_[4 * 32];
};

// A bank serves one word of 4 bytes in a pass, for all lanes that read it. Accesses of 8 bytes take
// one pass for each half of the warp, accesses of 16 bytes one for each quarter.
struct Passes {
    uint64_t all = 0, repeats = 0;

    Passes(const uintptr_t (&addresses)[32], unsigned lanes, uint32_t bytes) {
        const uint32_t words = std::max(bytes / BANK, 1u), group = 32 / std::min(words, 32u);
        for (uint32_t first = 0; first < 32; first += group) {
            uint32_t of_bank[BANKS] = {}, most = 0;
            Distinct seen;
            for (uint32_t lane = first; lane < first + group; ++lane) {
                if (!(lanes >> lane & 1)) continue;
                for (uint32_t word = 0; word < words; ++word) {
                    const uintptr_t number = addresses[lane] / BANK + word;
                    if (seen.add(number)) most = std::max(most, ++of_bank[number % BANKS]);
                }
            }
            all += most;
            repeats += most ? most - 1 : 0;
        }
    }
};

}  // namespace

void Counts::access(Site site, What what, const void* address, size_t bytes) {
    // Usually the previous lane did the same.
    size_t i = next_;
    const auto fits = [&](const Access& each) {
        return each.site == site && each.what == what && !(each.lanes >> lane_ & 1);
    };
    if (i >= used_ || !fits(accesses_[i])) {
        i = std::find_if(accesses_.begin(), accesses_.begin() + used_, fits) - accesses_.begin();
        if (i == used_) {
            if (accesses_.size() == used_) accesses_.emplace_back();
            accesses_[used_].site = site;
            accesses_[used_].what = what;
            accesses_[used_].bytes = static_cast<uint32_t>(bytes);
            accesses_[used_++].lanes = 0;
        }
    }
    accesses_[i].lanes |= 1u << lane_;
    accesses_[i].addresses[lane_] = reinterpret_cast<uintptr_t>(address);
    next_ = i + 1;
}

void Counts::end_step(unsigned active, unsigned exist, Site code) {
    Count& own = total(code, What::CODE);
    ++own.warps;
    own.lanes += __builtin_popcount(active);
    own.possible_lanes += __builtin_popcount(exist);
    for (size_t i = 0; i < used_; ++i) add(accesses_[i], exist);
    used_ = 0;
}

void Counts::add_barrier(Place place, unsigned lanes, unsigned exist) {
    Count& own = total(place, What::BARRIER);
    ++own.warps;
    own.lanes += __builtin_popcount(lanes);
    own.possible_lanes += __builtin_popcount(exist);
}

void Counts::add(const Access& access, unsigned exist) {
    Count& own = total(access.site, access.what);
    ++own.warps;
    own.lanes += __builtin_popcount(access.lanes);
    own.possible_lanes += __builtin_popcount(exist);
    if (access.what == What::SHARED_LOAD || access.what == What::SHARED_STORE) {
        const Passes passes(access.addresses, access.lanes, access.bytes);
        own.passes += passes.all;
        own.conflicts += passes.repeats;
        return;
    }
    Distinct sectors;
    for (uint32_t lane = 0; lane < 32; ++lane) {
        if (!(access.lanes >> lane & 1)) continue;
        const uintptr_t begin = access.addresses[lane];
        for (uintptr_t each = begin / SECTOR; each <= (begin + access.bytes - 1) / SECTOR; ++each)
            sectors.add(each);
    }
    own.sectors += sectors.size;
}

void Counts::give(const char* kernel, uintptr_t library) {
    All& to = all();
    std::lock_guard<std::mutex> hold(to.lock);
    for (auto& [key, count] : totals_) {
        count.what = key.what;
        count.file = key.site.place.file;
        count.line = key.site.place.line;
        if (key.site.address)
            count.place = reinterpret_cast<uintptr_t>(key.site.address) - library;
        snprintf(count.kernel, sizeof count.kernel, "%s", kernel);
        to.counts.push_back(count);
    }
    totals_.clear();
}

void note_launch(const char* kernel, dim3 grid, dim3 block, size_t static_shared,
                 size_t dynamic_shared) {
    Launched own{};
    snprintf(own.kernel, sizeof own.kernel, "%s", kernel);
    const uint32_t sizes[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
    memcpy(own.grid, sizes, sizeof own.grid + sizeof own.block);
    own.static_shared = static_shared;
    own.dynamic_shared = dynamic_shared;
    All& to = all();
    std::lock_guard<std::mutex> hold(to.lock);
    for (Launched& each : to.launches) {
        // All fields except the count.
        if (memcmp(&each, &own, offsetof(Launched, count))) continue;
        ++each.count;
        return;
    }
    own.count = 1;
    to.launches.push_back(own);
}

}  // namespace ece408_emulator

using namespace ece408_emulator;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Returns their number; copies as many as `to` has room for. Each worker has its own counts.
EXPORTED int ece408_emulator_counts(Count* to, int room) {
    std::lock_guard<std::mutex> hold(all().lock);
    const int found = static_cast<int>(all().counts.size());
    std::copy_n(all().counts.begin(), std::min(found, room), to);
    return found;
}

EXPORTED int ece408_emulator_launches(Launched* to, int room) {
    std::lock_guard<std::mutex> hold(all().lock);
    const int found = static_cast<int>(all().launches.size());
    std::copy_n(all().launches.begin(), std::min(found, room), to);
    return found;
}

EXPORTED void ece408_emulator_forget_counts() {
    std::lock_guard<std::mutex> hold(all().lock);
    all().counts.clear();
    all().launches.clear();
}
