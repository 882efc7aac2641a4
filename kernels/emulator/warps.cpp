// Warp functions: votes, shuffles, and waits of lanes for each other.

#include <algorithm>
#include <cstring>

#include "findings.h"
#include "runtime.h"

namespace ece408_emulator {
namespace {

constexpr unsigned ALL_LANES = 0xFFFFFFFF;

uint64_t reduced(Warp what, uint64_t a, uint64_t b) {
    const auto x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
    const auto s = static_cast<int32_t>(x), t = static_cast<int32_t>(y);
    switch (what) {
        case Warp::ADD: return x + y;
        case Warp::MIN: return static_cast<uint32_t>(std::min(s, t));
        case Warp::MAX: return static_cast<uint32_t>(std::max(s, t));
        case Warp::UMIN: return std::min(x, y);
        case Warp::UMAX: return std::max(x, y);
        case Warp::AND: return x & y;
        case Warp::OR: return x | y;
        default: return x ^ y;
    }
}

}  // namespace

// Lanes that reach the same place before any wait are active together.
unsigned Worker::active_lanes(Place at) {
    ++at_active_;
    wait(Waits::FOR_ACTIVE, at);
    return threads_[current_].mask;
}

// All lanes that could continue have: those of one warp and place continue together.
void Worker::release_active() {
    const auto waits = [](const Thread& t) { return t.waits == Waits::FOR_ACTIVE; };
    const auto first = std::find_if(threads_.begin(), threads_.begin() + count_, waits);
    const Place at = first->place;
    const uint32_t begin = (first - threads_.begin()) / LANES * LANES;
    unsigned lanes = 0;
    for (uint32_t i = begin; i < std::min(begin + LANES, count_); ++i)
        if (waits(threads_[i]) && !(threads_[i].place != at)) lanes |= 1u << (i - begin);
    for (uint32_t i = begin; i < std::min(begin + LANES, count_); ++i) {
        if (!(lanes >> (i - begin) & 1)) continue;
        threads_[i].mask = lanes;
        threads_[i].waits = Waits::NOT;
        ready_.push_back(i);
        --at_active_;
    }
}

uint64_t Worker::together(Place at, Warp what, unsigned mask, uint64_t value, int lane,
                          int width) {
    Thread& own = threads_[current_];
    const uint32_t warp = current_ / LANES, own_lane = current_ % LANES;
    if (!(mask >> own_lane & 1)) {
        note(Kind::WRONG_MASK, at, 0, "mask 0x%08x lacks the calling lane, %u", mask,
             own_lane);
        return value;
    }
    own.what = what;
    own.mask = mask;
    own.value = value;
    own.lane = lane;
    own.width = width;
    own.place = at;
    own.waits = Waits::FOR_WARP;
    release_warp(warp, mask);
    if (own.waits == Waits::FOR_WARP)
        wait(Waits::FOR_WARP, at);
    else if (counts)
        end_step();
    else
        place(current_);
    return own.result;
}

// If all lanes of the mask have arrived, they continue; the calling one at once, others at their
// turn.
void Worker::release_warp(uint32_t warp, unsigned mask) {
    const unsigned lanes = mask & existing(warp);
    const Thread* first = nullptr;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const Thread& each = threads_[warp * LANES + lane];
        if (each.waits != Waits::FOR_WARP || each.mask != mask) return;
        if (first && each.what != first->what) return;
        if (!first) first = &each;
    }
    answer(warp, lanes);
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const uint32_t i = warp * LANES + lane;
        threads_[i].waits = Waits::NOT;
        if (i != current_) ready_.push_back(i);
    }
}

void Worker::answer(uint32_t warp, unsigned lanes) {
    Thread* const all = &threads_[warp * LANES];
    unsigned voted = 0;
    uint64_t total = 0;
    bool any = false;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        voted |= unsigned{all[lane].value != 0} << lane;
        total = any ? reduced(all[lane].what, total, all[lane].value) : all[lane].value;
        any = true;
    }
    for (int lane = 0; lane < static_cast<int>(LANES); ++lane) {
        if (!(lanes >> lane & 1)) continue;
        Thread& each = all[lane];
        const int begin = lane / each.width * each.width, end = begin + each.width;
        int from = lane;
        switch (each.what) {
            case Warp::SYNC:
            case Warp::GATHER: each.result = 0; continue;
            case Warp::BALLOT: each.result = voted; continue;
            case Warp::MATCH:
                each.result = 0;
                for (uint32_t other = 0; other < LANES; ++other)
                    if (lanes >> other & 1 && all[other].value == each.value)
                        each.result |= uint64_t{1} << other;
                continue;
            case Warp::INDEX: from = begin + (each.lane & (each.width - 1)); break;
            case Warp::UP: from = lane - each.lane < begin ? lane : lane - each.lane; break;
            case Warp::DOWN: from = lane + each.lane >= end ? lane : lane + each.lane; break;
            case Warp::XOR: from = (lane ^ each.lane) >= end ? lane : lane ^ each.lane; break;
            default: each.result = total; continue;
        }
        if (!(lanes >> from & 1)) {
            const uint32_t calling = current_;
            place(warp * LANES + lane);
            note(Kind::WRONG_MASK, each.place, 0,
                 "lane %d reads from lane %d, which does not take part", lane, from);
            place(calling);
            from = lane;
        }
        each.result = all[from].value;
    }
    if (all[__builtin_ctz(lanes)].what == Warp::GATHER) {
        gathered_.resize(threads_.size());
        for (uint32_t lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1) gathered_[warp * LANES + lane] = all[lane].value;
    }
    // Each lane now knows the others' knowledge.
    if (known_.size() < threads_.size() * LANES) known_.resize(threads_.size() * LANES);
    warps_used_ = true;
    uint32_t most[LANES] = {}, clock = 0;
    for (uint32_t lane = 0; lane < LANES; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const uint32_t* const row = &known_[(warp * LANES + lane) * LANES];
        for (uint32_t other = 0; other < LANES; ++other) most[other] = std::max(most[other], row[other]);
        clock = std::max(clock, all[lane].clock);
    }
    // A common clock, so that one tag can stand for several lanes.
    for (uint32_t lane = 0; lane < LANES; ++lane)
        if (lanes >> lane & 1) most[lane] = clock, all[lane].clock = clock + 1;
    for (uint32_t lane = 0; lane < LANES; ++lane)
        if (lanes >> lane & 1) memcpy(&known_[(warp * LANES + lane) * LANES], most, sizeof most);
}

void Worker::copy_values(const void* (&to)[LANES]) const {
    const uint32_t first = current_ / LANES * LANES;
    for (uint32_t lane = 0; lane < LANES; ++lane)
        to[lane] = reinterpret_cast<const void*>(gathered_[first + lane]);
}

// After the end of a thread: lanes of its warp may have waited for it alone.
void Worker::try_warp_of(uint32_t thread) {
    if (!warps_used_ && ready_.empty() && ended_ == begun_) return;
    const uint32_t warp = thread / LANES;
    for (uint32_t i = warp * LANES; i < std::min((warp + 1) * LANES, count_); ++i)
        if (threads_[i].waits == Waits::FOR_WARP) {
            const unsigned mask = threads_[i].mask;
            release_warp(warp, mask);
        }
}

uint64_t together(Place place, Warp what, unsigned mask, uint64_t value, int lane, int width) {
    return worker->together(place, what, mask, value, lane, width);
}

void gather(Place place, const void* own, const void* (&all)[LANES]) {
    const auto value = reinterpret_cast<uint64_t>(own);
    worker->together(place, Warp::GATHER, ALL_LANES, value, 0, LANES);
    worker->copy_values(all);
}

unsigned active_lanes(Place place) { return worker->active_lanes(place); }

}  // namespace ece408_emulator
