// Memory that kernels allocate.

#include <atomic>
#include <cstdlib>
#include <new>

#include "findings.h"
#include "runtime.h"

using namespace ece408_emulator;

#define PLACE __builtin_return_address(0)

namespace {

// The heap of kernels' malloc and new: CUDA's default size, and its used bytes.
constexpr size_t HEAP = 8 << 20, HEAP_GAP = 512;
std::atomic<size_t> heap_taken{0};

void* allocate_in_kernel(size_t bytes) {
    void* const found = heap_taken + bytes > HEAP ? nullptr : emulator().memory.allocate(bytes, HEAP_GAP);
    if (found) heap_taken += bytes;
    return found;
}

void free_in_kernel(void* address, const void* place) {
    Memory& memory = emulator().memory;
    size_t begin = 0;
    const Memory::Allocation* const found = memory.nearest(address, &begin);
    const size_t bytes = found ? found->bytes : 0;
    if (!address) return;
    if (memory.free(address))
        heap_taken -= bytes;
    else
        note(Kind::FAILED_CALL, place, 0, "frees what is not allocated");
}

}  // namespace

extern "C" {

// Allocations in kernels, also new and delete, use the GPU's memory.
#define ALLOCATE(name, plain)                                                                    \
    __attribute__((visibility("default"))) void* __wrap_##name(size_t size) {                     \
        return worker ? allocate_in_kernel(size) : plain(size);                                  \
    }
#define FREE(name, plain, ...)                                                                   \
    __attribute__((visibility("default"))) void __wrap_##name(void* address __VA_ARGS__) {        \
        worker ? free_in_kernel(address, PLACE) : plain(address);                                \
    }
ALLOCATE(malloc, malloc)
ALLOCATE(_Znwm, operator new)
ALLOCATE(_Znam, operator new[])
FREE(free, free)
FREE(_ZdlPv, operator delete)
FREE(_ZdlPvm, operator delete, , size_t)
FREE(_ZdaPv, operator delete[])
FREE(_ZdaPvm, operator delete[], , size_t)

}  // extern "C"
