// CUDA's runtime functions, as include/runtime_api.h declares them.

#include <dlfcn.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "findings.h"
#include "include/cuda_runtime.h"
#include "runtime.h"

using namespace ece408_emulator;

struct ece408_event {
    std::chrono::steady_clock::time_point time;
    Clock clock;
};

namespace {

#define PLACE __builtin_return_address(0)

constexpr size_t CONSTANT_BYTES = 64 << 10, PITCH = 512;
constexpr uint32_t MANY_OPERATIONS = Streams::OPERATIONS / 2;
constexpr const char* NAME = "emulated GPU";

// Returns the error, and keeps it for cudaGetLastError.
cudaError_t said(int error) {
    Emulator& e = emulator();
    if (e.sticky) error = e.sticky;
    if (error) e.last = error, e.last_by_free = false;
    return static_cast<cudaError_t>(error);
}

// Notes a failed call as a finding, with this text; returns its error.
[[gnu::format(printf, 3, 4)]] cudaError_t failed(const void* from, int error, const char* format, ...) {
    char text[160];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    const char* const name = cudaGetErrorString(static_cast<cudaError_t>(error));
    note(Kind::FAILED_CALL, from, 0, "%s: %s", text, name);
    return said(error);
}

// An address in words.
struct Described {
    char text[64] = "memory of the host";

    explicit Described(const void* address) {
        const Memory& memory = emulator().memory;
        size_t begin = 0;
        if (!address) {
            snprintf(text, sizeof text, "a null pointer");
        } else if (memory.holds(address, 0)) {
            const Memory::Allocation* const found = memory.nearest(address, &begin);
            const size_t at = memory.offset(address) - begin;
            if (!found || found->freed || memory.offset(address) < begin || at > found->bytes)
                snprintf(text, sizeof text, "memory of the GPU that is not allocated");
            else if (at)
                snprintf(text, sizeof text, "byte %zu of an array of %zu bytes", at, found->bytes);
            else
                snprintf(text, sizeof text, "an array of %zu bytes", found->bytes);
        }
    }
};

cudaError_t failed_copy(const void* from_code, int error, const void* to, const void* from, size_t bytes) {
    return failed(from_code, error, "copies %zu bytes to %s from %s", bytes, Described(to).text,
                  Described(from).text);
}

cudaError_t failed_symbol(const void* from, int error, const void* symbol, size_t room, size_t bytes) {
    Dl_info found;
    const bool has_name = dladdr(symbol, &found) && found.dli_sname && found.dli_saddr == symbol;
    return failed(from, error, "copies %zu bytes to or from %s, which has %zu", bytes,
                  has_name ? found.dli_sname : "a variable", room);
}

// Ranges of addresses that a program has allocated or resolved.
struct Ranges {
    std::mutex lock;
    std::map<uintptr_t, size_t> all;

    void add(const void* address, size_t bytes) {
        std::lock_guard<std::mutex> hold(lock);
        all[reinterpret_cast<uintptr_t>(address)] = bytes;
    }
    void remove(const void* address) {
        std::lock_guard<std::mutex> hold(lock);
        all.erase(reinterpret_cast<uintptr_t>(address));
    }
    bool has(const void* address) {
        std::lock_guard<std::mutex> hold(lock);
        const auto at = reinterpret_cast<uintptr_t>(address);
        const auto next = all.upper_bound(at);
        return next != all.begin() && at - std::prev(next)->first < std::prev(next)->second;
    }
};

// Page-locked host memory; copies of other memory complete before their calls return.
Ranges& pinned() {
    static Ranges found;
    return found;
}

// Variables of the GPU with addresses on the host.
Ranges& symbols() {
    static Ranges found;
    return found;
}

// Whether bytes are in the GPU's memory; if the first is, all must be.
bool is_device(const void* address) {
    return emulator().memory.holds(address, 0) || symbols().has(address);
}

bool is_whole(const void* address, size_t bytes) {
    return !emulator().memory.holds(address, 0) || emulator().memory.is_allocated(address, bytes);
}

int bad_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (!bytes) return SUCCESS;
    if (!to || !from || !is_whole(to, bytes) || !is_whole(from, bytes)) return INVALID_VALUE;
    const bool to_device = is_device(to), from_device = is_device(from);
    switch (kind) {
        case cudaMemcpyHostToHost: return to_device || from_device ? INVALID_VALUE : SUCCESS;
        case cudaMemcpyHostToDevice: return !to_device || from_device ? INVALID_VALUE : SUCCESS;
        case cudaMemcpyDeviceToHost: return to_device || !from_device ? INVALID_VALUE : SUCCESS;
        case cudaMemcpyDeviceToDevice: return !to_device || !from_device ? INVALID_VALUE : SUCCESS;
        case cudaMemcpyDefault: return SUCCESS;
    }
    return INVALID_COPY_DIRECTION;
}

// Notes a missing stream; true if it is missing.
bool is_lost(const void* place, cudaStream_t stream) {
    {
        const auto alone = emulator().alone();
        if (emulator().streams.has(stream)) return false;
    }
    failed(place, INVALID_RESOURCE, "names a stream that is not there");
    return true;
}

void host_waits_for_all() {
    Emulator& e = emulator();
    const auto alone = e.alone();
    e.streams.host_waits_for_all();
    // No race crosses this point, so numbers of operations begin again before they run out.
    if ((e.operations & 0xFF) > MANY_OPERATIONS) e.operations |= 0xFF;
}

void host_waits_for(cudaStream_t stream) {
    Emulator& e = emulator();
    const auto alone = e.alone();
    e.streams.host_waits(e.streams.recorded(stream));
}

struct Rows {
    size_t to_pitch, from_pitch, bytes, count;
};

cudaError_t copied(const void* place, void* to, const void* from, const Rows& rows, cudaMemcpyKind kind,
                   cudaStream_t stream, bool is_async) {
    if (emulator().sticky || is_lost(place, stream)) return said(SUCCESS);
    {
        Transfer transfer(stream, place);
        for (size_t row = 0; row < rows.count; ++row) {
            void* const own_to = static_cast<char*>(to) + row * rows.to_pitch;
            const void* const own_from = static_cast<const char*>(from) + row * rows.from_pitch;
            if (const int error = bad_copy(own_to, own_from, rows.bytes, kind))
                return failed_copy(place, error, own_to, own_from, rows.bytes);
            transfer.reads(own_from, rows.bytes);
            transfer.writes(own_to, rows.bytes);
            memmove(own_to, own_from, rows.bytes);
            emulator().memory.set_written(own_to, rows.bytes);
        }
    }
    const bool is_between_arrays = is_device(to) && is_device(from);
    const bool is_over = !is_async || !pinned().has(is_device(to) ? from : to);
    if (is_between_arrays) return said(SUCCESS);
    if (is_over) {
        host_waits_for(stream);
    } else {
        const bool writes = !is_device(to);
        const auto begin = reinterpret_cast<uintptr_t>(writes ? to : from);
        const size_t pitch = writes ? rows.to_pitch : rows.from_pitch;
        const size_t bytes = rows.count ? (rows.count - 1) * pitch + rows.bytes : 0;
        const auto alone = emulator().alone();
        emulator().streams.copies_host(stream, {begin, begin + bytes, writes, place, 0, 0});
    }
    return said(SUCCESS);
}

cudaError_t set(const void* place, void* to, int value, size_t bytes, cudaStream_t stream) {
    if (emulator().sticky || is_lost(place, stream)) return said(SUCCESS);
    if (bytes && (!is_device(to) || !is_whole(to, bytes)))
        return failed(place, INVALID_VALUE, "sets %zu bytes of %s", bytes, Described(to).text);
    Transfer(stream, place).writes(to, bytes);
    memset(to, value, bytes);
    emulator().memory.set_written(to, bytes);
    return said(SUCCESS);
}

}  // namespace

void __syncthreads(const char* file, int line) { worker->arrive(0, {file, line}); }
int __syncthreads_count(int predicate, const char* file, int line) {
    return worker->arrive(predicate, {file, line}).sum;
}
int __syncthreads_and(int predicate, const char* file, int line) {
    const Arrived found = worker->arrive(predicate, {file, line});
    return found.sum == found.threads;
}
int __syncthreads_or(int predicate, const char* file, int line) {
    return worker->arrive(predicate, {file, line}).sum != 0;
}

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) {
    Emulator& e = emulator();
    if (!address) return said(INVALID_VALUE);
    if (e.sticky) return said(SUCCESS);
    e.memory.make(e.settings.checked, e.settings.cores);
    *address = bytes ? e.memory.allocate(bytes) : nullptr;
    return said(bytes && !*address ? MEMORY_ALLOCATION : SUCCESS);
}

cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned) {
    const cudaError_t error = cudaMalloc(address, bytes);
    if (error || !bytes) return error;
    // The host may write it at any time.
    emulator().memory.set_managed(*address);
    emulator().memory.set_written(*address, bytes);
    return error;
}

cudaError_t cudaMallocHost(void** address, size_t bytes) {
    *address = malloc(bytes);
    if (*address) pinned().add(*address, bytes);
    return said(*address || !bytes ? SUCCESS : MEMORY_ALLOCATION);
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    return cudaMallocHost(address, bytes);
}

cudaError_t cudaMallocPitch(void** address, size_t* pitch, size_t width, size_t height) {
    *pitch = (width + PITCH - 1) / PITCH * PITCH;
    return cudaMalloc(address, *pitch * height);
}

cudaError_t cudaFree(void* address) {
    if (!address) return said(SUCCESS);
    if (emulator().sticky) return said(SUCCESS);
    host_waits_for_all();
    if (emulator().memory.free(address)) return said(SUCCESS);
    note(Kind::FAILED_FREE, PLACE, 0, "frees %s", Described(address).text);
    const cudaError_t error = said(INVALID_VALUE);
    emulator().last_by_free = true;
    return error;
}

cudaError_t cudaFreeHost(void* address) {
    // It waits for the GPU's work.
    host_waits_for_all();
    pinned().remove(address);
    free(address);
    return said(SUCCESS);
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    pinned().add(address, bytes);
    return said(SUCCESS);
}

cudaError_t cudaHostUnregister(void* address) {
    pinned().remove(address);
    return said(SUCCESS);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    Emulator& e = emulator();
    e.memory.make(e.settings.checked, e.settings.cores);
    *free = e.memory.free_bytes();
    *total = e.memory.size();
    return said(SUCCESS);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return copied(PLACE, to, from, {0, 0, bytes, 1}, kind, nullptr, false);
}

cudaError_t ece408_emulator_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                 cudaStream_t stream) {
    return copied(PLACE, to, from, {0, 0, bytes, 1}, kind, stream, true);
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
    return copied(PLACE, to, from, {to_pitch, from_pitch, width, height}, kind, nullptr, false);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    return set(PLACE, to, value, bytes, nullptr);
}

cudaError_t ece408_emulator_fill(void* to, int value, size_t bytes, cudaStream_t stream) {
    return set(PLACE, to, value, bytes, stream);
}

cudaError_t ece408_emulator_to_symbol(const void* symbol, size_t room, const void* from,
                                      size_t bytes, size_t offset, cudaMemcpyKind kind) {
    if (emulator().sticky) return said(SUCCESS);
    if (kind != cudaMemcpyHostToDevice && kind != cudaMemcpyDeviceToDevice &&
        kind != cudaMemcpyDefault)
        return said(INVALID_COPY_DIRECTION);
    if (offset > room || bytes > room - offset)
        return failed_symbol(PLACE, INVALID_VALUE, symbol, room, bytes);
    if (!is_whole(from, bytes)) return failed_copy(PLACE, INVALID_VALUE, symbol, from, bytes);
    Transfer(nullptr, PLACE).reads(from, bytes);
    memcpy(static_cast<char*>(const_cast<void*>(symbol)) + offset, from, bytes);
    if (!is_device(from)) host_waits_for(nullptr);
    return said(SUCCESS);
}

cudaError_t ece408_emulator_from_symbol(void* to, const void* symbol, size_t room, size_t bytes,
                                        size_t offset, cudaMemcpyKind kind) {
    if (emulator().sticky) return said(SUCCESS);
    if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost)
        return said(INVALID_COPY_DIRECTION);
    if (offset > room || bytes > room - offset)
        return failed_symbol(PLACE, INVALID_VALUE, symbol, room, bytes);
    if (!is_whole(to, bytes)) return failed_copy(PLACE, INVALID_VALUE, to, symbol, bytes);
    Transfer(nullptr, PLACE).writes(to, bytes);
    memcpy(to, static_cast<const char*>(symbol) + offset, bytes);
    if (!is_device(to)) host_waits_for(nullptr);
    emulator().memory.set_written(to, bytes);
    return said(SUCCESS);
}

void ece408_emulator_symbol(const void* symbol, size_t bytes) { symbols().add(symbol, bytes); }

int ece408_emulator_last_by_free() { return emulator().last_by_free; }

cudaError_t cudaDeviceSynchronize() {
    host_waits_for_all();
    return static_cast<cudaError_t>(emulator().sticky.load());
}

cudaError_t cudaDeviceReset() {
    host_waits_for_all();
    emulator().sticky = emulator().last = SUCCESS;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    Emulator& e = emulator();
    return static_cast<cudaError_t>(e.sticky ? e.sticky.load() : e.last.exchange(SUCCESS));
}

cudaError_t cudaPeekAtLastError() {
    Emulator& e = emulator();
    return static_cast<cudaError_t>(e.sticky ? e.sticky.load() : e.last.load());
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (static_cast<int>(error)) {
        case SUCCESS: return "no error";
        case INVALID_VALUE: return "invalid argument";
        case MEMORY_ALLOCATION: return "out of memory";
        case INVALID_CONFIGURATION: return "invalid configuration argument";
        case INVALID_SYMBOL: return "invalid device symbol";
        case INVALID_DEVICE_POINTER: return "invalid device pointer";
        case INVALID_COPY_DIRECTION: return "invalid copy direction for memcpy";
        case INVALID_DEVICE: return "invalid device ordinal";
        case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
        case LAUNCH_TIMEOUT: return "the launch timed out and was terminated";
        case ASSERTED: return "device-side assert triggered";
        case MISALIGNED_ADDRESS: return "misaligned address";
        case LAUNCH_FAILURE: return "unspecified launch failure";
        case NOT_SUPPORTED: return "operation not supported";
        default: return "unknown error";
    }
}

const char* cudaGetErrorName(cudaError_t error) {
    switch (static_cast<int>(error)) {
        case SUCCESS: return "cudaSuccess";
        case INVALID_VALUE: return "cudaErrorInvalidValue";
        case MEMORY_ALLOCATION: return "cudaErrorMemoryAllocation";
        case INVALID_CONFIGURATION: return "cudaErrorInvalidConfiguration";
        case ILLEGAL_ADDRESS: return "cudaErrorIllegalAddress";
        case MISALIGNED_ADDRESS: return "cudaErrorMisalignedAddress";
        case LAUNCH_FAILURE: return "cudaErrorLaunchFailure";
        default: return "cudaErrorUnknown";
    }
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return said(SUCCESS);
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return said(SUCCESS);
}

cudaError_t cudaSetDevice(int device) { return said(device ? INVALID_DEVICE : SUCCESS); }

// The properties of an H100, except for its memory.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
    if (device) return said(INVALID_DEVICE);
    *found = {};
    snprintf(found->name, sizeof found->name, "%s", NAME);
    Emulator& e = emulator();
    e.memory.make(e.settings.checked, e.settings.cores);
    found->totalGlobalMem = e.memory.size();
    found->totalConstMem = CONSTANT_BYTES;
    found->sharedMemPerBlock = LARGEST_STATIC_SHARED;
    found->sharedMemPerBlockOptin = LARGEST_SHARED;
    found->sharedMemPerMultiprocessor = LARGEST_SHARED + 1024;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = LANES;
    found->maxThreadsPerBlock = 1024;
    const int threads[] = {1024, 1024, 64}, blocks[] = {0x7FFFFFFF, 65535, 65535};
    memcpy(found->maxThreadsDim, threads, sizeof threads);
    memcpy(found->maxGridSize, blocks, sizeof blocks);
    found->major = 9;
    found->multiProcessorCount = 132;
    found->clockRate = 1980000;
    found->memoryClockRate = 2619000;
    found->memoryBusWidth = 5120;
    found->l2CacheSize = 50 << 20;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxBlocksPerMultiProcessor = 32;
    found->concurrentKernels = found->unifiedAddressing = found->canMapHostMemory = 1;
    found->memPitch = 0x7FFFFFFF;
    found->textureAlignment = PITCH;
    return said(SUCCESS);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp found;
    if (const cudaError_t error = cudaGetDeviceProperties(&found, device)) return error;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = found.maxThreadsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(found.sharedMemPerBlock); break;
        case cudaDevAttrWarpSize: *value = found.warpSize; break;
        case cudaDevAttrMultiProcessorCount: *value = found.multiProcessorCount; break;
        case cudaDevAttrComputeCapabilityMajor: *value = found.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = found.minor; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(found.sharedMemPerBlockOptin);
            break;
        default: return said(INVALID_VALUE);
    }
    return said(SUCCESS);
}

cudaError_t ece408_emulator_allow_shared(cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return said(SUCCESS);
    if (value < 0 || static_cast<size_t>(value) > LARGEST_SHARED) return said(INVALID_VALUE);
    Emulator& e = emulator();
    e.most_shared = std::max(e.most_shared, static_cast<size_t>(value));
    return said(SUCCESS);
}

cudaError_t ece408_emulator_stream(cudaStream_t* stream, unsigned flags) {
    const auto alone = emulator().alone();
    *stream = emulator().streams.create(!(flags & cudaStreamNonBlocking));
    return said(SUCCESS);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (is_lost(PLACE, stream)) return said(SUCCESS);
    const auto alone = emulator().alone();
    return said(emulator().streams.destroy(stream) ? SUCCESS : INVALID_RESOURCE);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (is_lost(PLACE, stream)) return cudaPeekAtLastError();
    host_waits_for(stream);
    return cudaPeekAtLastError();
}

cudaError_t ece408_emulator_wait(cudaStream_t stream, cudaEvent_t event) {
    if (is_lost(PLACE, stream)) return cudaPeekAtLastError();
    const auto alone = emulator().alone();
    emulator().streams.wait(stream, event->clock);
    return cudaPeekAtLastError();
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const auto alone = emulator().alone();
    emulator().streams.host_waits(event->clock);
    return cudaPeekAtLastError();
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new ece408_event{std::chrono::steady_clock::now(), {}};
    return said(SUCCESS);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return said(SUCCESS);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (is_lost(PLACE, stream)) return said(SUCCESS);
    const auto alone = emulator().alone();
    event->clock = emulator().streams.recorded(stream);
    event->time = std::chrono::steady_clock::now();
    return said(SUCCESS);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
    return said(SUCCESS);
}

// Configures this library for the process: the number of cores; a random order from a seed, if
// `random`; checks, if the kernel was compiled with them.
__attribute__((visibility("default"))) void ece408_emulator_set(int cores, int mode, int random,
                                                                uint64_t seed) {
    // In the order of `library.Emulation`.
    enum { FAST, CHECKED, COUNTED };
    emulator().settings = {cores, mode == CHECKED, mode == COUNTED, random != 0, seed};
}

}  // extern "C"
