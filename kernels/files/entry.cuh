// What a compiled CUDA kernel file of the course exports. Each form's source includes the file and
// defines `compute`.
#pragma once

#include <chrono>

#include <cuda_runtime.h>

#include "guarded.h"

// Seconds of the parts of a call: the kernels, and what surrounds them (allocations, copies).
struct ece408_file_seconds {
    double kernels, around;
};

namespace ece408_file {

void compute(const ece408_problem& p, const float* x, const float* w, float* y,
             ece408_file_seconds& seconds);

inline void check(const char* what, cudaError_t status) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Seconds that `part` takes with all the GPU's work that it leaves unfinished. Throws CUDA's errors.
template <class Part>
double timed(const char* what, Part part) {
    const auto begin = std::chrono::steady_clock::now();
    part();
    const cudaError_t last = cudaGetLastError();
    check(what, cudaDeviceSynchronize());
    check(what, last);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace ece408_file

// Compute y; the form says where the arrays are. The GPU's context is current.
extern "C" ECE408_EXPORT int ece408_file_forward(const ece408_problem* problem, const float* x,
                                                 const float* w, float* y,
                                                 ece408_file_seconds* seconds) {
    return ece408_file::guarded([=] {
        // An error that a call before has left is not this one's.
        cudaGetLastError();
        *seconds = {};
        ece408_file::compute(*problem, x, w, y, *seconds);
    });
}
