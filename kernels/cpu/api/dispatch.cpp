// The functions of the library that compute. Each runs the requested kernel, or the one that
// choice.h chooses, in the build for the requested instruction set, and refuses what the kernel or
// the CPU cannot do.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "api/choice.h"
#include "api/shape.h"
#include "host/buffer.h"
#include "host/ceilings.h"
#include "host/halves.h"
#include "host/pages.h"
#include "layers/batch_norm.h"
#include "layers/pool.h"

namespace ece408 {
namespace {

#define ECE408_ROW(name) ECE408_BUILDS(name),
constexpr const Kernel* kKernels[][3] = {ECE408_KERNELS(ECE408_ROW)};
#define ECE408_NAME(name) #name,
constexpr const char* kNames[] = {ECE408_KERNELS(ECE408_NAME)};
constexpr const Ceilings* kCeilings[3] = ECE408_BUILDS(ceilings);
constexpr const BatchNorm* kBatchNorm[3] = ECE408_BUILDS(batch_norm);
constexpr const Pools* kPools[3] = ECE408_BUILDS(pool);
constexpr int64_t kLanes[] = {4, 8, 16};

#if defined(__x86_64__)
// GCC before 11 cannot check for F16C; it is bit 29 of leaf 1's ECX.
bool cpu_has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

// Read once: in a virtual machine the instruction takes as long as a small layer.
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

// The number of threads with enough to do: handing work to a thread takes as long as half a million
// products, and loading or storing an element as long as `kNumber` of them.
int useful_threads(const ece408_problem& problem, int threads) {
    constexpr double kNumber = 16, kLeast = 1 << 19;
    const Shape s = derive(problem);
    const double outputs = static_cast<double>(s.batch) * s.filters * s.out_height * s.out_width;
    const double inputs = static_cast<double>(s.batch) * s.channels * s.height * s.width;
    const double products = outputs * s.group_channels * s.kernel_h * s.kernel_w;
    const double most = 1 + (products + kNumber * (inputs + outputs)) / kLeast;
    return most < threads ? static_cast<int>(most) : threads;
}

// Whether arguments describe something to compute.
bool usable(const ece408_problem* problem, int isa) {
    return problem && valid(*problem) && isa >= ECE408_BASELINE && isa <= ECE408_AVX512;
}

Task task_of(const ece408_problem& problem, Direction direction, int64_t element_bytes, int isa,
             bool strict, bool kept) {
    // Half precision is computed as float.
    const int64_t bytes = strict ? 8 : element_bytes == 2 ? 4 : element_bytes;
    return {problem, direction, bytes, kLanes[isa], strict, kept};
}

// The elements of a direction's output.
int64_t outputs(const ece408_problem& problem, Direction direction) {
    const Shape s = derive(problem);
    if (direction == Direction::forward) return s.batch * s.filters * s.out_height * s.out_width;
    if (direction == Direction::backward_data) return s.batch * s.channels * s.height * s.width;
    return weights(problem);
}

// Prepares the output of a direction unless it is accumulated.
template <class T>
void prepare(const ece408_problem& problem, Direction direction, T* output, bool accumulate) {
    if (!accumulate)
        ask_for_huge_pages(output, outputs(problem, direction) * int64_t{sizeof(T)});
}

// The arrays of a direction: its two inputs, the bias of the forward pass or null, and its output.
template <class T>
struct Arrays {
    const T *a, *b, *bias;
    T* out;

    explicit operator bool() const { return a && b && out; }
};

// Runs the requested or chosen kernel's function of a direction, of its functions `of`.
template <class T>
int run(const ece408_problem* problem, Direction direction, Directions<T> Kernel::*of, bool strict,
        const Arrays<T>& arrays, bool accumulate, int threads, int isa, int kernel) {
    if (!usable(problem, isa) || !arrays || threads < 1) return ECE408_INVALID;
    if (!cpu_has(isa)) return ECE408_UNSUPPORTED;
    const Task task = task_of(*problem, direction, sizeof(T), isa, strict, false);
    const int useful = useful_threads(*problem, threads);
    const auto run_one = [&](KernelName name) {
        const Directions<T>& found = kKernels[static_cast<int>(name)][isa]->*of;
        const auto& [a, b, bias, out] = arrays;
        prepare(*problem, direction, out, accumulate);
        if (direction == Direction::forward)
            return found.forward(*problem, a, b, bias, out, accumulate, useful);
        const auto gradient =
            direction == Direction::backward_data ? found.backward_data : found.backward_weight;
        return gradient(*problem, a, b, out, accumulate, useful);
    };
    const auto name = kernel == ECE408_CHOSEN ? choose(task) : static_cast<KernelName>(kernel);
    if (!suits(name, task)) return ECE408_UNSUPPORTED;
    const int status = run_one(name);
    return status == kNotFinite ? run_one(choose_for_any(task)) : status;
}

// The same for half precision, in float: converts the inputs, and the output back. Products of two
// halves are exact in float.
int run(const ece408_problem* problem, Direction direction, Directions<float> Kernel::*of,
        bool strict, const Arrays<uint16_t>& arrays, bool accumulate, int threads, int isa,
        int kernel) {
    if (!usable(problem, isa) || !arrays || threads < 1) return ECE408_INVALID;
    if (!cpu_has(isa)) return ECE408_UNSUPPORTED;
    const auto as_floats = [&](const uint16_t* from, int64_t count) {
        Buffer<float> floats(count);
        if (floats) to_floats(reinterpret_cast<const Half*>(from), count, floats, threads, isa);
        return floats;
    };
    const bool is_forward = direction == Direction::forward;
    const auto of_a = direction == Direction::backward_data ? Direction::backward_weight
                                                            : Direction::backward_data;
    const auto of_b = is_forward ? Direction::backward_weight : Direction::forward;
    const int64_t count = outputs(*problem, direction);
    const Buffer<float> a = as_floats(arrays.a, outputs(*problem, of_a));
    const Buffer<float> b = as_floats(arrays.b, outputs(*problem, of_b));
    const Buffer<float> bias =
        arrays.bias ? as_floats(arrays.bias, problem->filters) : Buffer<float>();
    const Buffer<float> out = accumulate ? as_floats(arrays.out, count) : Buffer<float>(count);
    if (!a || !b || !out || (arrays.bias && !bias)) return ECE408_NO_MEMORY;
    const Arrays<float> wide{a, b, bias, out};
    const int status =
        run(problem, direction, of, strict, wide, accumulate, threads, isa, kernel);
    if (status == ECE408_OK)
        to_halves(out, count, reinterpret_cast<Half*>(arrays.out), threads, isa);
    return status;
}

// The requested or chosen kernel for the forward pass in float32 with kept packed weights; null if
// it cannot compute.
const Kernel* forward_kernel(const ece408_problem* problem, int isa, int kernel) {
    if (!usable(problem, isa) || !cpu_has(isa)) return nullptr;
    const Task task = task_of(*problem, Direction::forward, sizeof(float), isa, false, true);
    const auto name = kernel == ECE408_CHOSEN ? choose(task) : static_cast<KernelName>(kernel);
    return suits(name, task) ? kKernels[static_cast<int>(name)][isa] : nullptr;
}

}  // namespace
}  // namespace ece408

int ece408_abi_version(void) { return ECE408_ABI_VERSION; }

int ece408_isa_supported(int isa) { return ece408::cpu_has(isa) ? 1 : 0; }

const char* ece408_kernel_name(int kernel) {
    constexpr int count = sizeof(ece408::kNames) / sizeof(ece408::kNames[0]);
    return kernel >= 0 && kernel < count ? ece408::kNames[kernel] : nullptr;
}

int ece408_choose(const ece408_problem* problem, int direction, int element_bytes, int isa,
                  int strict, int kept) {
    using namespace ece408;
    if (!usable(problem, isa) || direction < 0 || direction > 2) return ECE408_CHOSEN;
    const auto which = static_cast<Direction>(direction);
    const Task task = task_of(*problem, which, element_bytes, isa, strict != 0, kept != 0);
    return static_cast<int>(choose(task));
}

// Runs the kernels' functions `of` on arrays of T.
#define ECE408_RUN(T, direction, of, strict, ...)                                                \
    return ece408::run(problem, ece408::Direction::direction, &ece408::Kernel::of, strict,       \
                       ece408::Arrays<T>{__VA_ARGS__}, accumulate != 0, threads, isa, kernel);

#define ECE408_DEFINE(T, suffix, of, strict)                                                     \
    int ece408_forward_##suffix(const ece408_problem* problem, const T* x, const T* w,           \
                                const T* bias, T* y, int accumulate, int threads, int isa,       \
                                int kernel) {                                                    \
        ECE408_RUN(T, forward, of, strict, x, w, bias, y)                                        \
    }                                                                                            \
    int ece408_backward_data_##suffix(const ece408_problem* problem, const T* w, const T* dy,    \
                                      T* dx, int accumulate, int threads, int isa, int kernel) { \
        ECE408_RUN(T, backward_data, of, strict, w, dy, nullptr, dx)                             \
    }                                                                                            \
    int ece408_backward_weight_##suffix(const ece408_problem* problem, const T* x, const T* dy,  \
                                        T* dw, int accumulate, int threads, int isa,             \
                                        int kernel) {                                            \
        ECE408_RUN(T, backward_weight, of, strict, x, dy, nullptr, dw)                           \
    }

ECE408_DEFINE(float, f32, f32, false)
ECE408_DEFINE(double, f64, f64, false)
ECE408_DEFINE(float, strict, strict, true)
ECE408_DEFINE(uint16_t, f16, f32, false)

int64_t ece408_packed_floats(const ece408_problem* problem, int isa, int kernel) {
    using namespace ece408;
    const Kernel* const found = forward_kernel(problem, isa, kernel);
    return found && found->packed_floats ? found->packed_floats(*problem) : 0;
}

int ece408_pack(const ece408_problem* problem, const float* w, const float* bias, float* packed,
                int threads, int isa, int kernel) {
    using namespace ece408;
    if (!usable(problem, isa) || !w || !packed || threads < 1) return ECE408_INVALID;
    const Kernel* const found = forward_kernel(problem, isa, kernel);
    if (!found || !found->pack) return ECE408_UNSUPPORTED;
    const int status = found->pack(*problem, w, bias, packed, threads);
    return status == kNotFinite ? ECE408_UNSUPPORTED : status;
}

int ece408_forward_packed(const ece408_problem* problem, const float* x, const float* w,
                          const float* bias, const float* packed, const ece408_epilogue* epilogue,
                          float* y, int threads, int isa, int kernel) {
    using namespace ece408;
    if (!usable(problem, isa) || !x || !w || !y || threads < 1) return ECE408_INVALID;
    const Kernel* const found = forward_kernel(problem, isa, kernel);
    if (!found || !found->forward_packed) return ECE408_UNSUPPORTED;
    prepare(*problem, Direction::forward, y, false);
    const int useful = useful_threads(*problem, threads);
    const int status = found->forward_packed(*problem, x, w, bias, packed,
                                             epilogue ? *epilogue : ece408_epilogue{}, y, useful);
    return status == kNotFinite ? ECE408_UNSUPPORTED : status;
}

int ece408_batch_norm_forward(const ece408_batch* batch, const float* x, const float* added,
                              const float* gamma, const float* beta, float* y, float* mean,
                              float* inverse, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ask_for_huge_pages(y, batch->images * batch->channels * batch->pixels * 4);
    ece408::kBatchNorm[isa]->forward(*batch, x, added, gamma, beta, y, mean, inverse, threads);
    return ECE408_OK;
}

int ece408_batch_norm_backward(const ece408_batch* batch, const float* x, const float* y,
                               const float* dy, const float* gamma, const float* mean,
                               const float* inverse, float* dx, float* dadded, float* dgamma,
                               float* dbeta, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ece408::kBatchNorm[isa]->backward(*batch, x, y, dy, gamma, mean, inverse, dx, dadded, dgamma,
                                      dbeta, threads);
    return ECE408_OK;
}

int ece408_pool(const ece408_windows* rows, const ece408_windows* columns, const float* heights,
                const float* widths, int64_t planes, const float* x, float* y, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ask_for_huge_pages(y, planes * rows->count * columns->count * 4);
    const bool has_memory = ece408::kPools[isa]->forward(*rows, *columns, heights, widths, planes, x, y,
                                                         threads);
    return has_memory ? ECE408_OK : ECE408_NO_MEMORY;
}

int ece408_pool_backward(const ece408_windows* rows, const ece408_windows* columns,
                         const float* heights, const float* widths, int64_t planes, const float* x,
                         const float* y, const float* dy, float* dx, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ask_for_huge_pages(dx, planes * rows->size * columns->size * 4);
    const bool has_memory = ece408::kPools[isa]->backward(*rows, *columns, heights, widths, planes,
                                                          x, y, dy, dx, threads);
    return has_memory ? ECE408_OK : ECE408_NO_MEMORY;
}

double ece408_ceiling_multiply_adds(int64_t thousands, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return 0;
    return ece408::kCeilings[isa]->multiply_adds(thousands, threads);
}

int ece408_ceiling_stores(float* to, int64_t floats, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ece408::kCeilings[isa]->store_all(to, floats, threads);
    return ECE408_OK;
}

int ece408_ceiling_reads(const float* from, int64_t floats, int threads, int isa) {
    if (!ece408::cpu_has(isa)) return ECE408_UNSUPPORTED;
    ece408::kCeilings[isa]->read_all(from, floats, threads);
    return ECE408_OK;
}

float ece408_half_to_float(uint16_t bits) { return ece408::portable_to_float({bits}); }

uint16_t ece408_float_to_half(float value) { return ece408::portable_to_half(value).bits; }
