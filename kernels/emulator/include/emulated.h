// Functions that a translated CUDA kernel calls: addresses of its blocks' shared memory, and
// launches. runtime.cpp implements them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

// Memory that a kernel's code does not access by itself, such as a launch's arguments, is not
// checked.
#define ECE408_UNCHECKED __attribute__((no_sanitize("thread"), no_sanitize("bounds")))

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// Constants to a kernel: the compiler may keep them, and does not check their reads. A dim3 has
// constructors, so it could not be constant.
#ifdef ECE408_EMULATED
extern __thread const uint3 threadIdx, blockIdx, blockDim, gridDim;
#else
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
#endif

typedef struct ece408_stream* cudaStream_t;

namespace ece408_emulator {

// A static shared variable: its offset in each block's shared memory, the same for a launch.
struct Slot {
    uint64_t launch_and_offset;
};

void* shared(Slot* slot, size_t bytes, size_t alignment);
void* dynamic_shared(size_t alignment);

struct Launch {
    dim3 grid, block;
    size_t shared_bytes;

    cudaStream_t stream;

    Launch(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t stream = nullptr)
        : grid(grid), block(block), shared_bytes(shared_bytes), stream(stream) {}

    // Runs `kernel` with these arguments, copied for each thread, as CUDA does.
    template <class Kernel, class... Arguments>
    ECE408_UNCHECKED __attribute__((always_inline)) inline void run(const char* name, Kernel kernel, Arguments... arguments) const {
        auto call = [&]() ECE408_UNCHECKED { kernel(arguments...); };
        begin(name, [](void* each) ECE408_UNCHECKED { (*static_cast<decltype(call)*>(each))(); }, &call);
    }

    void begin(const char* name, void (*thread)(void*), void* call) const;
};

// Like cuLaunchKernel: `arguments` are the addresses of the kernel's arguments.
template <class... Arguments, size_t... Index>
inline void launch_each(const char* name, void (*kernel)(Arguments...), const Launch& sizes,
                        void** arguments, std::index_sequence<Index...>) {
    sizes.run(name, kernel, *static_cast<std::remove_cv_t<Arguments>*>(arguments[Index])...);
}

template <class... Arguments>
inline void launch(const char* name, void (*kernel)(Arguments...), const unsigned* sizes,
                   size_t shared_bytes, void** arguments) {
    const dim3 grid(sizes[0], sizes[1], sizes[2]), block(sizes[3], sizes[4], sizes[5]);
    launch_each(name, kernel, Launch(grid, block, shared_bytes), arguments,
                std::index_sequence_for<Arguments...>());
}

// The place of a function call. The compiler may duplicate a call, so an address would not identify
// it.
struct Place {
    const char* file;
    int line;
    bool operator!=(const Place& other) const { return file != other.file || line != other.line; }
};
// A place, or a return address.
struct Site {
    const void* address;
    Place place;
    Site(const void* address = nullptr) : address(address), place{nullptr, 0} {}
    Site(Place place) : address(nullptr), place(place) {}
    bool operator==(const Site& other) const {
        return address == other.address && !(place != other.place);
    }
};
#define ECE408_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

enum class Warp { SYNC, INDEX, UP, DOWN, XOR, BALLOT, MATCH, GATHER, ADD, MIN, MAX, UMIN, UMAX, AND, OR, EXCLUSIVE_OR };
// A warp function: its result for each lane of `mask`. `lane` and `width` belong to shuffles.
uint64_t together(Place place, Warp what, unsigned mask, uint64_t value, int lane = 0,
                  int width = 32);
// Collects an address of each lane of a whole warp.
void gather(Place place, const void* own, const void* (&all)[32]);
// The lanes that are at this place together.
unsigned active_lanes(Place place);

// Before an atomic function accesses these bytes. A loop may wait by one that `may_spin`; a plain
// read before one that `compares` is no race.
void atomic(Place place, const void* address, size_t bytes, bool may_spin, bool compares = false);
void fence();
// Copies to shared memory: the target must not be accessed before the wait.
void begin_copy(void* shared, size_t bytes);
void commit_copies();
void wait_for_copies(size_t but);
void fence_block();
[[noreturn]] void trap(Place place, const char* what);
[[noreturn]] void fail_assertion(Place place, const char* text);

}  // namespace ece408_emulator
