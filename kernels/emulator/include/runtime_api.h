// The functions of CUDA's runtime (CUDA Runtime API). Calls end with their work; races between
// streams are detected all the same.
#pragma once

enum cudaError_t {
    cudaSuccess = ece408_emulator::SUCCESS,
    cudaErrorInvalidValue = ece408_emulator::INVALID_VALUE,
    cudaErrorMemoryAllocation = ece408_emulator::MEMORY_ALLOCATION,
    cudaErrorInvalidConfiguration = ece408_emulator::INVALID_CONFIGURATION,
    cudaErrorInvalidSymbol = ece408_emulator::INVALID_SYMBOL,
    cudaErrorInvalidDevicePointer = ece408_emulator::INVALID_DEVICE_POINTER,
    cudaErrorInvalidMemcpyDirection = ece408_emulator::INVALID_COPY_DIRECTION,
    cudaErrorInvalidDevice = ece408_emulator::INVALID_DEVICE,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorInvalidResourceHandle = ece408_emulator::INVALID_RESOURCE,
    cudaErrorIllegalAddress = ece408_emulator::ILLEGAL_ADDRESS,
    cudaErrorLaunchTimeout = ece408_emulator::LAUNCH_TIMEOUT,
    cudaErrorAssert = ece408_emulator::ASSERTED,
    cudaErrorMisalignedAddress = ece408_emulator::MISALIGNED_ADDRESS,
    cudaErrorLaunchFailure = ece408_emulator::LAUNCH_FAILURE,
    cudaErrorNotSupported = ece408_emulator::NOT_SUPPORTED,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidPitchValue = 12,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorCooperativeLaunchTooLarge = 720,
    cudaErrorUnknown = 999,
};
typedef cudaError_t cudaError;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault,
};
enum cudaFuncCache {
    cudaFuncCachePreferNone,
    cudaFuncCachePreferShared,
    cudaFuncCachePreferL1,
    cudaFuncCachePreferEqual,
};
enum cudaSharedMemConfig {
    cudaSharedMemBankSizeDefault,
    cudaSharedMemBankSizeFourByte,
    cudaSharedMemBankSizeEightByte,
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventBlockingSync = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocDefault = 0,
    cudaHostRegisterDefault = 0,
    cudaDeviceScheduleAuto = 0,
    cudaMemAttachGlobal = 1,
    cudaMemAttachHost = 2,
};
typedef struct ece408_event* cudaEvent_t;
#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(1))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    size_t totalConstMem, memPitch;
    int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock, maxThreadsDim[3];
    int maxGridSize[3], clockRate, major, minor, multiProcessorCount, memoryClockRate;
    int memoryBusWidth, l2CacheSize, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int concurrentKernels, asyncEngineCount, unifiedAddressing, canMapHostMemory, ECCEnabled;
    int integrated, kernelExecTimeoutEnabled, computeMode, deviceOverlap, cooperativeLaunch;
    int pciBusID, pciDeviceID, pciDomainID, managedMemory;
    size_t textureAlignment;
};

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes);
cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned flags);
cudaError_t cudaMallocHost(void** address, size_t bytes);
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned flags);
cudaError_t cudaMallocPitch(void** address, size_t* pitch, size_t width, size_t height);
cudaError_t cudaFree(void* address);
cudaError_t cudaFreeHost(void* address);
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* address);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind);
cudaError_t cudaMemset(void* to, int value, size_t bytes);
cudaError_t ece408_emulator_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                 cudaStream_t stream);
cudaError_t ece408_emulator_fill(void* to, int value, size_t bytes, cudaStream_t stream);
cudaError_t ece408_emulator_to_symbol(const void* symbol, size_t room, const void* from,
                                      size_t bytes, size_t offset, cudaMemcpyKind kind);
cudaError_t ece408_emulator_from_symbol(void* to, const void* symbol, size_t room, size_t bytes,
                                        size_t offset, cudaMemcpyKind kind);

void ece408_emulator_symbol(const void* symbol, size_t bytes);

// Whether the last error is of a cudaFree().
int ece408_emulator_last_by_free();

cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceReset();
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t ece408_emulator_allow_shared(cudaFuncAttribute attribute, int value);

cudaError_t ece408_emulator_stream(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t ece408_emulator_wait(cudaStream_t stream, cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

}  // extern "C"

// Functions without an effect.
#define ECE408_NOTHING(name, ...) \
    inline cudaError_t name(__VA_ARGS__) { return cudaPeekAtLastError(); }
ECE408_NOTHING(cudaDeviceSetCacheConfig, cudaFuncCache)
ECE408_NOTHING(cudaDeviceSetSharedMemConfig, cudaSharedMemConfig)
ECE408_NOTHING(cudaSetDeviceFlags, unsigned)
ECE408_NOTHING(cudaInitDevice, int, unsigned, unsigned)
ECE408_NOTHING(cudaProfilerStart)
ECE408_NOTHING(cudaProfilerStop)
#undef ECE408_NOTHING

inline cudaError_t ece408_emulator_version(int* version) {
    *version = 13000;
    return cudaPeekAtLastError();
}
inline cudaError_t cudaRuntimeGetVersion(int* version) { return ece408_emulator_version(version); }
inline cudaError_t cudaDriverGetVersion(int* version) { return ece408_emulator_version(version); }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return cudaPeekAtLastError();
}
inline cudaError_t cudaThreadSynchronize() { return cudaDeviceSynchronize(); }
// The queried work is complete: the program continues as after a wait.
__forceinline__ cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
inline cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }
__forceinline__ cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
    return ece408_emulator_wait(stream, event);
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return ece408_emulator_stream(stream, 0); }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return ece408_emulator_stream(stream, flags);
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return ece408_emulator_stream(stream, flags);
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return cudaEventCreate(event);
}
__forceinline__ cudaError_t cudaEventRecord(cudaEvent_t event) { return cudaEventRecord(event, nullptr); }

template <class T>
inline cudaError_t cudaMalloc(T** address, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void**>(address), bytes);
}
template <class T>
inline cudaError_t cudaMallocManaged(T** address, size_t bytes, unsigned flags = 1) {
    return cudaMallocManaged(reinterpret_cast<void**>(address), bytes, flags);
}
template <class T>
inline cudaError_t cudaMallocHost(T** address, size_t bytes, unsigned = 0) {
    return cudaMallocHost(reinterpret_cast<void**>(address), bytes);
}
template <class T>
inline cudaError_t cudaHostAlloc(T** address, size_t bytes, unsigned flags) {
    return cudaHostAlloc(reinterpret_cast<void**>(address), bytes, flags);
}
template <class T>
inline cudaError_t cudaMallocPitch(T** address, size_t* pitch, size_t width, size_t height) {
    return cudaMallocPitch(reinterpret_cast<void**>(address), pitch, width, height);
}
template <class T>
inline cudaError_t cudaMallocAsync(T** address, size_t bytes, cudaStream_t) {
    return cudaMalloc(address, bytes);
}
__forceinline__ cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
__forceinline__ cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr) {
    return ece408_emulator_copy(to, from, bytes, kind, stream);
}
__forceinline__ cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr) {
    return ece408_emulator_fill(to, value, bytes, stream);
}

template <class T>
__forceinline__ cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, size_t bytes,
                                      size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return ece408_emulator_to_symbol(&symbol, sizeof symbol, from, bytes, offset, kind);
}
template <class T>
__forceinline__ cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* from, size_t bytes,
                                           size_t offset = 0,
                                           cudaMemcpyKind kind = cudaMemcpyHostToDevice,
                                           cudaStream_t = nullptr) {
    return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
template <class T>
__forceinline__ cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                        cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return ece408_emulator_from_symbol(to, &symbol, sizeof symbol, bytes, offset, kind);
}
template <class T>
inline cudaError_t cudaGetSymbolSize(size_t* bytes, const T& symbol) {
    *bytes = sizeof symbol;
    return cudaSuccess;
}
template <class T>
inline cudaError_t cudaGetSymbolAddress(void** address, const T& symbol) {
    *address = const_cast<void*>(static_cast<const void*>(&symbol));
    ece408_emulator_symbol(&symbol, sizeof symbol);
    return cudaSuccess;
}

template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute attribute, int value) {
    return ece408_emulator_allow_shared(attribute, value);
}
template <class Kernel>
inline cudaError_t cudaFuncSetCacheConfig(Kernel, cudaFuncCache) {
    return cudaSuccess;
}
