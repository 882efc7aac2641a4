// Chooses, while the program runs, the build of a kernel for the instruction set asked for, and
// refuses what the kernel or the CPU cannot do.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "ceilings.h"
#include "depthwise.h"
#include "direct.h"
#include "general.h"
#include "shape.h"
#include "winograd.h"

namespace ece408 {
namespace {

// The build of a kernel, a function or a table of them, for an instruction set that there is.
#if defined(__x86_64__)
template <class Kernel>
Kernel& pick(int isa, Kernel& baseline, Kernel& avx2, Kernel& avx512) {
    return isa == ECE408_AVX512 ? avx512 : isa == ECE408_AVX2 ? avx2 : baseline;
}
#define ECE408_BUILD(kernel, isa) \
    ece408::pick(isa, ece408::kernel##_baseline, ece408::kernel##_avx2, ece408::kernel##_avx512)
#else
#define ECE408_BUILD(kernel, isa) ((void)(isa), ece408::kernel##_baseline)
#endif

#if defined(__x86_64__)
// The compilers' own check knows no F16C before GCC 11; it is bit 29 of leaf 1's ECX.
bool cpu_has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

// Asked once: in a virtual machine the instruction takes as long as a small layer.
const bool has_f16c = cpu_has_f16c();
#endif

bool cpu_has(int isa) {
#if defined(__x86_64__)
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
    if (isa == ECE408_AVX2) return avx2;
    if (isa == ECE408_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && avx2;
#endif
    return isa == ECE408_BASELINE;
}

// Threads that have enough to do: waking one costs as much as some millions of operations.
int useful_threads(const ece408_problem& problem, int threads) {
    const Shape s = derive(problem);
    const double products = static_cast<double>(s.batch) * s.filters * s.out_height * s.out_width *
                            s.group_channels * s.kernel_h * s.kernel_w;
    const double most = 1 + products / (1 << 20);
    return most < threads ? static_cast<int>(most) : threads;
}

// What keeps a call from running, or ECE408_OK and then the threads it should use.
int admit(const ece408_problem* problem, bool arrays, int isa, int* threads) {
    if (!problem || !arrays || *threads < 1 || !valid(*problem)) return ECE408_INVALID;
    *threads = useful_threads(*problem, *threads);
    return cpu_has(isa) ? ECE408_OK : ECE408_UNSUPPORTED;
}

}  // namespace
}  // namespace ece408

int ece408_abi_version(void) { return ECE408_ABI_VERSION; }

int ece408_isa_supported(int isa) { return ece408::cpu_has(isa) ? 1 : 0; }

#define ECE408_DEFINE_DIRECT(kernel)                                                             \
    int ece408_##kernel##_forward_f32(const ece408_problem* problem, const float* x,             \
                                      const float* w, const float* bias, float* y,               \
                                      int accumulate, int threads, int isa) {                    \
        const int status = ece408::admit(problem, x && w && y, isa, &threads);                   \
        if (status != ECE408_OK) return status;                                                  \
        return ECE408_BUILD(kernel##_forward, isa)(*problem, x, w, bias, y, accumulate != 0,     \
                                                   threads);                                     \
    }                                                                                            \
    int ece408_##kernel##_backward_data_f32(const ece408_problem* problem, const float* w,       \
                                            const float* dy, float* dx, int accumulate,          \
                                            int threads, int isa) {                              \
        const int status = ece408::admit(problem, w && dy && dx, isa, &threads);                 \
        if (status != ECE408_OK) return status;                                                  \
        return ECE408_BUILD(kernel##_backward_data, isa)(*problem, w, dy, dx, accumulate != 0,   \
                                                         threads);                               \
    }

ECE408_DEFINE_DIRECT(direct)
ECE408_DEFINE_DIRECT(winograd)
ECE408_DEFINE_DIRECT(depthwise)

#define ECE408_DEFINE_GENERAL(T, suffix)                                                         \
    int ece408_general_forward_##suffix(const ece408_problem* problem, const T* x, const T* w,   \
                                        const T* bias, T* y, int accumulate, int threads,        \
                                        int isa) {                                               \
        const int status = ece408::admit(problem, x && w && y, isa, &threads);                   \
        if (status != ECE408_OK) return status;                                                  \
        return ECE408_BUILD(general, isa).suffix.forward(*problem, x, w, bias, y,                \
                                                         accumulate != 0, threads);              \
    }                                                                                            \
    int ece408_general_backward_data_##suffix(const ece408_problem* problem, const T* w,         \
                                              const T* dy, T* dx, int accumulate, int threads,   \
                                              int isa) {                                         \
        const int status = ece408::admit(problem, w && dy && dx, isa, &threads);                 \
        if (status != ECE408_OK) return status;                                                  \
        return ECE408_BUILD(general, isa).suffix.backward_data(*problem, w, dy, dx,              \
                                                               accumulate != 0, threads);        \
    }                                                                                            \
    int ece408_general_backward_weight_##suffix(const ece408_problem* problem, const T* x,       \
                                                const T* dy, T* dw, int accumulate, int threads, \
                                                int isa) {                                       \
        const int status = ece408::admit(problem, x && dy && dw, isa, &threads);                 \
        if (status != ECE408_OK) return status;                                                  \
        return ECE408_BUILD(general, isa).suffix.backward_weight(*problem, x, dy, dw,            \
                                                                 accumulate != 0, threads);      \
    }

ECE408_DEFINE_GENERAL(float, f32)
ECE408_DEFINE_GENERAL(double, f64)
ECE408_DEFINE_GENERAL(uint16_t, f16)

double ece408_ceiling_multiply_adds(int64_t thousands, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return 0;
    return ECE408_BUILD(ceilings, isa).multiply_adds(thousands, threads);
}

int ece408_ceiling_stores(float* to, int64_t floats, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ECE408_BUILD(ceilings, isa).store_all(to, floats, threads);
    return ECE408_OK;
}

int ece408_ceiling_reads(const float* from, int64_t floats, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ECE408_BUILD(ceilings, isa).read_all(from, floats, threads);
    return ECE408_OK;
}

float ece408_half_to_float(uint16_t bits) { return ece408::portable_to_float({bits}); }

uint16_t ece408_float_to_half(float value) { return ece408::portable_to_half(value).bits; }
