// Chooses, while the program runs, the build of a kernel for the instruction set asked for, and
// refuses what the kernel or the CPU cannot do.
#include "direct.h"
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

bool cpu_has(int isa) {
#if defined(__x86_64__)
    if (isa == ECE408_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == ECE408_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return isa == ECE408_BASELINE;
}

bool direct_does(const ece408_problem& p) {
    return p.stride_h == 1 && p.stride_w == 1 && p.pad_h == 0 && p.pad_w == 0 &&
           p.dilate_h == 1 && p.dilate_w == 1 && p.groups == 1;
}

}  // namespace
}  // namespace ece408

int ece408_abi_version(void) { return ECE408_ABI_VERSION; }

int ece408_isa_supported(int isa) { return ece408::cpu_has(isa) ? 1 : 0; }

int ece408_direct_forward_f32(const ece408_problem* problem, const float* x, const float* w,
                              const float* bias, float* y, int accumulate, int threads, int isa) {
    if (!problem || !x || !w || !y || threads < 1 || !ece408::valid(*problem))
        return ECE408_INVALID;
    if (!ece408::direct_does(*problem) || !ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    return ece408::direct_forward(isa)(*problem, x, w, bias, y, accumulate != 0, threads);
}
