// What a translated CUDA kernel calls: where its blocks' shared memory lies, and its launches.
// runtime.cpp has the other side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

// Memory that a kernel's code does not touch by itself, such as a launch's arguments, is not checked.
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

// To a kernel they are constants: the compiler may keep them, and does not check reading them. A
// dim3 has constructors, with which it would be none.
#ifdef ECE408_EMULATED
extern __thread const uint3 threadIdx, blockIdx, blockDim, gridDim;
#else
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
#endif

typedef struct ece408_stream* cudaStream_t;

namespace ece408_emulator {

// A static shared variable: its offset in the shared memory of each block of a launch.
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

    // Run `kernel` with these arguments, which are copied for each thread, as CUDA does.
    template <class Kernel, class... Arguments>
    ECE408_UNCHECKED __attribute__((always_inline)) inline void run(const char* name, Kernel kernel, Arguments... arguments) const {
        auto call = [&]() ECE408_UNCHECKED { kernel(arguments...); };
        begin(name, [](void* each) ECE408_UNCHECKED { (*static_cast<decltype(call)*>(each))(); }, &call);
    }

    void begin(const char* name, void (*thread)(void*), void* call) const;
};

// As cuLaunchKernel: `arguments` are the addresses of what the kernel takes.
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

// Where a function is called. The compiler may copy a call: addresses would not tell.
struct Place {
    const char* file;
    int line;
    bool operator!=(const Place& other) const { return file != other.file || line != other.line; }
};
// The same, or a return address.
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
// One of a warp's functions: for each lane of `mask` its result. `lane` and `width` are a shuffle's.
uint64_t together(Place place, Warp what, unsigned mask, uint64_t value, int lane = 0,
                  int width = 32);
// Of each lane of a whole warp its address.
void gather(Place place, const void* own, const void* (&all)[32]);
// Lanes that are at this place together.
unsigned active_lanes(Place place);

// Before an atomic function touches these bytes; a loop may wait by one that `may_spin`, and one that
// `compares` may follow a plain read.
void atomic(Place place, const void* address, size_t bytes, bool may_spin, bool compares = false);
void fence();
// Of copies to shared memory: what is copied must not be touched until it is waited for.
void begin_copy(void* shared, size_t bytes);
void commit_copies();
void wait_for_copies(size_t but);
void fence_block();
[[noreturn]] void trap(Place place, const char* what);
[[noreturn]] void fail_assertion(Place place, const char* text);

}  // namespace ece408_emulator
