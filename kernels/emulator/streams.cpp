#include "streams.h"

#include <algorithm>

namespace ece408_emulator {
namespace {

constexpr size_t LEGACY = 0, OF_THREAD = 1;

}  // namespace

Streams::Streams() : streams_{{true, true, {}}, {true, true, {}}} {}

// The legacy stream is 0 and 1 (cudaStreamLegacy), that of a thread 2 (cudaStreamPerThread).
size_t Streams::index_of(cudaStream_t stream) {
    const auto number = reinterpret_cast<uintptr_t>(stream);
    return number ? number - 1 : LEGACY;
}

bool Streams::has(cudaStream_t stream) const {
    const size_t index = index_of(stream);
    return index < streams_.size() && streams_[index].is_there;
}

cudaStream_t Streams::create(bool is_blocking) {
    // Work of a blocking stream alone never runs beside the legacy stream's.
    are_several_ |= !is_blocking || streams_.size() > OF_THREAD + 1;
    auto found = std::find_if(streams_.begin(), streams_.end(), [](const Stream& s) { return !s.is_there; });
    if (found == streams_.end()) found = streams_.insert(found, Stream{});
    // A stream that replaces a destroyed one knows its work.
    found->is_there = true;
    found->is_blocking = is_blocking;
    return reinterpret_cast<cudaStream_t>(found - streams_.begin() + 1);
}

bool Streams::destroy(cudaStream_t stream) {
    if (!has(stream) || index_of(stream) <= OF_THREAD) return false;
    streams_[index_of(stream)].is_there = false;
    return true;
}

void Streams::join(Clock& to, const Clock& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

Clock& Streams::reached(size_t index) {
    Stream& own = streams_[index];
    join(own.clock, host_);
    if (index != LEGACY) {
        if (own.is_blocking) join(own.clock, streams_[LEGACY].clock);
    } else {
        for (const Stream& each : streams_)
            if (each.is_blocking) join(own.clock, each.clock);
    }
    return own.clock;
}

const std::atomic<uint8_t>* Streams::begin(cudaStream_t stream, uint32_t number, uintptr_t library) {
    const size_t index = index_of(stream);
    are_several_ |= index == OF_THREAD && streams_.size() > OF_THREAD + 1;
    Clock& clock = reached(index);
    if (clock.size() <= index) clock.resize(index + 1);
    Operation& own = operations_[number];
    own = {index, ++clock[index], library, {}};
    own.all.set(number);
    if (!are_several_) return nullptr;
    std::bitset<OPERATIONS> beside;
    for (uint32_t i = 1; i < OPERATIONS; ++i) {
        const Operation& each = operations_[i];
        if (each.all[i] && each.count > (each.stream < clock.size() ? clock[each.stream] : 0)) beside.set(i);
    }
    for (uint32_t i = 1; i < OPERATIONS; ++i) unordered_[i] = (operations_[i].all & beside).any();
    last_own_ = 0;
    return beside.any() ? unordered_ : nullptr;
}

void Streams::forget() {
    for (Operation& each : operations_) each = {};
}

void Streams::host_waits(const Clock& event) {
    join(host_, event);
    const auto is_over = [&](const HostCopy& each) {
        return each.stream < host_.size() && each.count <= host_[each.stream];
    };
    host_copies_.erase(std::remove_if(host_copies_.begin(), host_copies_.end(), is_over), host_copies_.end());
    copies_host_ = !host_copies_.empty();
}

void Streams::host_waits_for_all() {
    for (const Stream& each : streams_) host_waits(each.clock);
}

void Streams::copies_host(cudaStream_t stream, HostCopy copy) {
    copy.stream = index_of(stream);
    Clock& clock = reached(copy.stream);
    if (clock.size() <= copy.stream) clock.resize(copy.stream + 1);
    copy.count = ++clock[copy.stream];
    host_copies_.push_back(copy);
    copies_host_ = true;
}

const Streams::HostCopy* Streams::too_early(uintptr_t begin, uintptr_t end, bool writes) const {
    for (const HostCopy& each : host_copies_)
        if (begin < each.end && each.begin < end && (writes || each.writes)) return &each;
    return nullptr;
}

uint32_t Streams::both(uint32_t before, uint32_t own, uint32_t (*next)()) {
    if (before == last_before_ && own == last_own_) return last_both_;
    const auto all = operations_[before].all | operations_[own].all;
    uint32_t found = 1;
    while (found < OPERATIONS && operations_[found].all != all) ++found;
    if (found == OPERATIONS) {
        found = next();
        if (!found) return own;
        operations_[found] = {0, 0, operations_[own].library, all};
        unordered_[found] = 1;
    }
    last_before_ = before, last_own_ = own, last_both_ = found;
    return found;
}

}  // namespace ece408_emulator
