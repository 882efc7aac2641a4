// Chooses, while the program runs, the build of a kernel for the instruction set asked for, and
// refuses what the kernel or the CPU cannot do.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "direct.h"
#include "general.h"
#include "shape.h"

namespace ece408 {
namespace {

DirectForward* direct_forward(int isa) {
#if defined(__x86_64__)
    if (isa == ECE408_AVX2) return direct_forward_avx2;
    if (isa == ECE408_AVX512) return direct_forward_avx512;
#endif
    return isa == ECE408_BASELINE ? direct_forward_baseline : nullptr;
}

const GeneralKernels& general(int isa) {
#if defined(__x86_64__)
    if (isa == ECE408_AVX2) return general_avx2;
    if (isa == ECE408_AVX512) return general_avx512;
#endif
    (void)isa;
    return general_baseline;
}

#if defined(__x86_64__)
// The compilers' own check knows no F16C before GCC 11; it is bit 29 of leaf 1's ECX.
bool cpu_has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

bool cpu_has(int isa) {
#if defined(__x86_64__)
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
    if (isa == ECE408_AVX2) return avx2;
    if (isa == ECE408_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && avx2;
#endif
    return isa == ECE408_BASELINE;
}

// What keeps a call of the general kernels from running, or ECE408_OK.
int refusal(const ece408_problem* problem, bool arrays, int threads, int isa) {
    if (!problem || !arrays || threads < 1 || !valid(*problem)) return ECE408_INVALID;
    return cpu_has(isa) ? ECE408_OK : ECE408_UNSUPPORTED;
}

}  // namespace
}  // namespace ece408

int ece408_abi_version(void) { return ECE408_ABI_VERSION; }

int ece408_isa_supported(int isa) { return ece408::cpu_has(isa) ? 1 : 0; }

int ece408_direct_forward_f32(const ece408_problem* problem, const float* x, const float* w,
                              const float* bias, float* y, int accumulate, int threads, int isa) {
    if (!problem || !x || !w || !y || threads < 1 || !ece408::valid(*problem))
        return ECE408_INVALID;
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    return ece408::direct_forward(isa)(*problem, x, w, bias, y, accumulate != 0, threads);
}

#define ECE408_DEFINE_GENERAL(T, suffix)                                                         \
    int ece408_general_forward_##suffix(const ece408_problem* problem, const T* x, const T* w,   \
                                        const T* bias, T* y, int accumulate, int threads,        \
                                        int isa) {                                               \
        const int status = ece408::refusal(problem, x && w && y, threads, isa);                  \
        if (status != ECE408_OK) return status;                                                  \
        return ece408::general(isa).suffix.forward(*problem, x, w, bias, y, accumulate != 0,     \
                                                   threads);                                     \
    }                                                                                            \
    int ece408_general_backward_data_##suffix(const ece408_problem* problem, const T* w,         \
                                              const T* dy, T* dx, int accumulate, int threads,   \
                                              int isa) {                                         \
        const int status = ece408::refusal(problem, w && dy && dx, threads, isa);                \
        if (status != ECE408_OK) return status;                                                  \
        return ece408::general(isa).suffix.backward_data(*problem, w, dy, dx, accumulate != 0,   \
                                                         threads);                               \
    }                                                                                            \
    int ece408_general_backward_weight_##suffix(const ece408_problem* problem, const T* x,       \
                                                const T* dy, T* dw, int accumulate, int threads, \
                                                int isa) {                                       \
        const int status = ece408::refusal(problem, x && dy && dw, threads, isa);                \
        if (status != ECE408_OK) return status;                                                  \
        return ece408::general(isa).suffix.backward_weight(*problem, x, dy, dw, accumulate != 0, \
                                                           threads);                             \
    }

ECE408_DEFINE_GENERAL(float, f32)
ECE408_DEFINE_GENERAL(double, f64)
ECE408_DEFINE_GENERAL(uint16_t, f16)

float ece408_half_to_float(uint16_t bits) { return ece408::portable_to_float({bits}); }

uint16_t ece408_float_to_half(float value) { return ece408::portable_to_half(value).bits; }
