// The exports of a compiled CUDA kernel file of the course. Each form's source includes the file
// and defines `compute`.
#pragma once

#include <chrono>

#include <cuda_runtime.h>

#include "guarded.h"

// Seconds of the parts of a call: the kernels, and the rest (allocations, copies).
struct ece408_file_seconds {
    double kernels, around;
};

namespace ece408_file {

void compute(const ece408_problem& p, const float* x, const float* w, float* y,
             ece408_file_seconds& seconds);

// Runs the file's kernels on arrays on the GPU, and waits for them.
void compute_on_gpu(const ece408_problem& p, const float* x, const float* w, float* y);

// Advice after an error.
inline const char* advice(cudaError_t status) {
    switch (status) {
        case cudaErrorInvalidValue:
        case cudaErrorInvalidConfiguration:
            return " (does a launch have 0 blocks, over 1024 threads in a block, over 65535 blocks "
                   "in y or z, or too much shared memory; or a copy for more than an array has?)";
        case cudaErrorLaunchOutOfResources:
            return " (do the threads of a block need more registers than there are? try fewer, or "
                   "__launch_bounds__)";
        case cudaErrorIllegalAddress:
        case cudaErrorMisalignedAddress:
#ifdef ECE408_EMULATED
            return "";
#else
            return " (ece408 lab check --sanitize names the line)";
#endif
        default:
            return "";
    }
}

inline void check(const char* what, cudaError_t status) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status) +
                                 advice(status));
}

// The seconds of `part` and of its unfinished work on the GPU. Throws CUDA's errors.
template <class Part>
double timed(const char* what, Part part) {
    const auto begin = std::chrono::steady_clock::now();
    part();
    cudaError_t last = cudaGetLastError();
#ifdef ECE408_EMULATED
    // It is reported with its line, and is harmless.
    if (ece408_emulator_last_by_free()) last = cudaSuccess;
#endif
    check(what, cudaDeviceSynchronize());
    check(what, last);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace ece408_file

// Whether the file's allocations on the GPU are filled with NaN, as unwritten memory may happen to
// hold zeros. The linker redirects the file's calls of cudaMalloc to this function (--wrap).
static bool ece408_fills_allocations = false;

extern "C" ECE408_EXPORT void ece408_file_fill_allocations(int fills) {
    ece408_fills_allocations = fills != 0;
}

extern "C" cudaError_t __real_cudaMalloc(void** address, size_t nbytes);
#ifdef ECE408_EMULATED
extern "C" void* __real_memset(void* address, int value, size_t nbytes);
#endif

extern "C" cudaError_t __wrap_cudaMalloc(void** address, size_t nbytes) {
    const cudaError_t status = __real_cudaMalloc(address, nbytes);
    if (status != cudaSuccess || !ece408_fills_allocations) return status;
#ifdef ECE408_EMULATED
    // For the emulator's checks it stays unwritten memory.
    __real_memset(*address, 0xFF, nbytes);
    return status;
#endif
    cudaMemset(*address, 0xFF, nbytes);
    // The file's streams may not wait for the stream of the fill.
    return cudaStreamSynchronize(nullptr);
}

// `compute_on_gpu` for each of several sets of x, w and y. This loop keeps the host's overhead at a
// constant few microseconds for each.
extern "C" ECE408_EXPORT int ece408_file_call_each(const ece408_problem* problem,
                                                   float* const* arrays, int sets) {
    return ece408_file::guarded([=] {
        cudaGetLastError();
        for (float* const* each = arrays; each != arrays + 3 * sets; each += 3)
            ece408_file::compute_on_gpu(*problem, each[0], each[1], each[2]);
    });
}

// Computes y; the form defines whether the arrays are on the host or the GPU. The GPU's context is
// current.
extern "C" ECE408_EXPORT int ece408_file_forward(const ece408_problem* problem, const float* x,
                                                 const float* w, float* y,
                                                 ece408_file_seconds* seconds) {
    return ece408_file::guarded([=] {
        // Clears an error of an earlier call.
        cudaGetLastError();
        *seconds = {};
        ece408_file::compute(*problem, x, w, y, *seconds);
    });
}
