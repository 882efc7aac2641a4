// CUDA kernels launched without Python, on the stream that MXNet gives a GPU operator, whose
// context is current on MXNet's threads. Later work of MXNet's on that stream starts after them,
// and MXNet waits for the stream before it reports results as complete.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "callbacks.h"

namespace ece408 {

// The driver's functions, null until Python has passed them.
inline ece408_driver driver{};

class Launch {
public:
    explicit Launch(const ece408_launch& given)
        : given_(given),
          arguments_(given.arguments, given.arguments + given.argument_bytes),
          slots_(given.slots, given.slots + given.slot_count) {}

    // Enqueues it with these array addresses; false if the driver refuses.
    bool enqueue(void* const* arrays, void* stream) const {
        std::vector<char> arguments = arguments_;
        for (const ece408_slot& slot : slots_)
            std::memcpy(&arguments[slot.offset], &arrays[slot.array], sizeof(void*));
        size_t size = arguments.size();
        // CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END: the driver copies the arguments.
        void* extra[] = {reinterpret_cast<void*>(1), arguments.data(), reinterpret_cast<void*>(2),
                         &size, nullptr};
        const auto &grid = given_.grid, &block = given_.block;
        return driver.launch(given_.function, grid[0], grid[1], grid[2], block[0], block[1],
                             block[2], given_.shared_bytes, stream, nullptr, extra) == 0;
    }

private:
    ece408_launch given_;  // its arrays may have gone
    std::vector<char> arguments_;
    std::vector<ece408_slot> slots_;
};

inline bool enqueue(const std::vector<Launch>& launches, void* const* arrays, void* stream) {
    return std::all_of(launches.begin(), launches.end(),
                       [&](const Launch& launch) { return launch.enqueue(arrays, stream); });
}

// Waits for all work on the stream; false if the wait or any of the work failed.
inline bool wait_for(void* stream) {
    return driver.synchronize && driver.synchronize(stream) == 0;
}

struct Event {
    Event() { driver.create_event(&handle, 0); }
    Event(const Event&) = delete;
    ~Event() {
        if (handle) driver.destroy_event(handle);
    }

    bool record(void* stream) const { return handle && driver.record(handle, stream) == 0; }

    void* handle = nullptr;  // stays null if it cannot be made
};

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// The duration of a call, and of its GPU kernels, in seconds.
struct Times {
    double all = 0, gpu = 0;
};

// Runs launches after all earlier work on the stream, and waits for them; false if any of it
// failed.
inline bool run_timed(const std::vector<Launch>& launches, void* const* arrays, void* stream,
                      Times* times) {
    const Event begin, end;
    if (!wait_for(stream)) return false;
    const auto start = Clock::now();
    const bool is_done = begin.record(stream) && enqueue(launches, arrays, stream) &&
                         end.record(stream) && wait_for(stream);
    times->all = seconds_since(start);
    float milliseconds = 0;
    if (!is_done || driver.elapsed(&milliseconds, begin.handle, end.handle) != 0) return false;
    times->gpu = milliseconds / 1e3;
    return true;
}

}  // namespace ece408
