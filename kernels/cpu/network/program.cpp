// Computes the steps of a program in order. Convolutions are calls of the library's own functions.
#include "network/program.h"

#include <errno.h>
#include <time.h>

#include "api/shape.h"
#include "host/buffer.h"
#include "network/steps.h"

namespace ece408 {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr const Pointwise* kPointwise[3] = ECE408_BUILDS(pointwise);
constexpr const Rows* kRows[3] = ECE408_BUILDS(rows);

int pointwise(const Step& step) { return kPointwise[step.isa]->compute(step); }
int reduce(const Step& step) { return kRows[step.isa]->reduce(step); }
int softmax(const Step& step) { return kRows[step.isa]->softmax(step); }
int one_hot(const Step& step) { return kRows[step.isa]->one_hot(step); }

// y = clamp(y [+ added]), after a kernel that has no epilogue.
int finish(const Step& step) {
    const ece408_convolve& convolve = step.of.of.convolve;
    const bool adds = step.of.in[3].base >= 0;
    ece408_step chain = {};
    chain.in[0] = chain.out = step.of.out;
    chain.in[1] = step.of.in[3];
    ece408_pointwise& of = chain.of.pointwise;
    const Shape s = derive(convolve.problem);
    of.elements = s.batch * s.filters * s.out_height * s.out_width;
    of.inputs = adds ? 2 : 1;
    if (adds) of.op[of.ops++] = {ECE408_TERM_ADD, {0, 1}, 0, 0, 0};
    const auto sums = static_cast<int32_t>(adds ? of.inputs : 0);
    of.op[of.ops++] = {ECE408_TERM_CLIP, {sums}, 0, convolve.lowest, convolve.highest};
    return pointwise({chain, step.bases, step.threads, step.isa});
}

int convolve(const Step& step) {
    const ece408_convolve& of = step.of.of.convolve;
    const ece408_problem* const problem = &of.problem;
    const float *const x = input(step, 0), *const w = input(step, 1), *const bias = input(step, 2);
    const float *const added = input(step, 3), *packed = input(step, 4);
    float* const y = output(step);
    const bool is_plain = !added && of.lowest == -kInfinity && of.highest == kInfinity;
    if (packed)
        packed = *reinterpret_cast<const int32_t*>(packed) == 1
                     ? packed + ECE408_PACKED_HEADER / sizeof(float)
                     : nullptr;
    const auto forward = [&](const ece408_epilogue* epilogue) {
        return ece408_forward_packed(problem, x, w, bias, packed, epilogue, y, step.threads,
                                     step.isa, of.kernel);
    };
    int status = ECE408_UNSUPPORTED;
    if (of.strict) {
        status = ece408_forward_strict(problem, x, w, bias, y, 0, step.threads, step.isa,
                                       of.kernel);
    } else {
        if (!is_plain) {
            // An epilogue has a factor and an addend for each filter.
            const int64_t filters = most(problem->filters, 0);
            const Buffer<float> factors(2 * filters);
            if (!factors) return ECE408_NO_MEMORY;
            for (int64_t m = 0; m < filters; ++m) factors[m] = 1, factors[filters + m] = 0;
            const ece408_epilogue epilogue = {factors, factors + filters, added, of.lowest,
                                              of.highest};
            status = forward(&epilogue);
            if (status != ECE408_UNSUPPORTED) return status;
        }
        status = forward(nullptr);
        if (status == ECE408_UNSUPPORTED)
            status = ece408_forward_f32(problem, x, w, bias, y, 0, step.threads, step.isa,
                                        of.kernel);
    }
    return status == ECE408_OK && !is_plain ? finish(step) : status;
}

int pack(const Step& step) {
    const ece408_convolve& of = step.of.of.convolve;
    float* const packed = output(step);
    if (!packed) return ECE408_INVALID;
    const int status = ece408_pack(&of.problem, input(step, 0), input(step, 1),
                                   packed + ECE408_PACKED_HEADER / sizeof(float), step.threads,
                                   step.isa, of.kernel);
    *reinterpret_cast<int32_t*>(packed) = status == ECE408_OK;
    return status == ECE408_UNSUPPORTED ? ECE408_OK : status;
}

// A gradient of a convolution, from two arrays; it adds to what a third one, y itself, holds.
template <class Compute>
int gradient(const Step& step, Compute* compute) {
    const ece408_convolve& of = step.of.of.convolve;
    const float* const held = input(step, 2);
    if (held && held != output(step)) return ECE408_INVALID;
    return compute(&of.problem, input(step, 0), input(step, 1), output(step), held != nullptr,
                   step.threads, step.isa, of.kernel);
}

int data_gradient(const Step& step) {
    return gradient(step, step.of.of.convolve.strict ? ece408_backward_data_strict
                                                     : ece408_backward_data_f32);
}

int weight_gradient(const Step& step) {
    return gradient(step, step.of.of.convolve.strict ? ece408_backward_weight_strict
                                                     : ece408_backward_weight_f32);
}

float* also(const Step& step, int number) { return at(step, step.of.also[number]); }

int norm(const Step& step) {
    return ece408_batch_norm_forward(&step.of.of.batch, input(step, 0), input(step, 3),
                                     input(step, 2), input(step, 1), output(step), also(step, 0),
                                     also(step, 1), step.threads, step.isa);
}

int norm_gradient(const Step& step) {
    const float *const x = input(step, 0), *const y = input(step, 5);
    if (step.of.of.batch.is_relu && !y) return ECE408_INVALID;
    return ece408_batch_norm_backward(&step.of.of.batch, x, y ? y : x, input(step, 1),
                                      input(step, 4), input(step, 2), input(step, 3), output(step),
                                      also(step, 2), also(step, 0), also(step, 1), step.threads,
                                      step.isa);
}

// By enum ece408_step_kind.
constexpr int (*kKinds[])(const Step&) = {
    convolve,    pack,   data_gradient, pointwise,          copy_strided,
    pool_planes, reduce, softmax,       normalise_channels, resize_planes,
    weight_gradient,     pool_gradient, norm,               norm_gradient,
    one_hot,
};

// Only these kinds take images that are apart.
bool are_images_together(const ece408_step& step) {
    if (step.kind == ECE408_POINTWISE || step.kind == ECE408_POOL) return true;
    for (const ece408_operand& in : step.in)
        if (in.base >= 0 && in.image != 0) return false;
    return step.out.image == 0;
}

int compute(const Step& step) {
    constexpr int64_t kinds = sizeof kKinds / sizeof kKinds[0];
    const bool is_known = step.of.kind >= 0 && step.of.kind < kinds && step.of.out.base >= 0;
    if (!is_known || !are_images_together(step.of)) return ECE408_INVALID;
    return kKinds[step.of.kind](step);
}

// exp and others set errno, which MXNet takes for an error of its own when it reads a number later.
struct KeptErrno {
    const int before = errno;
    ~KeptErrno() { errno = before; }
};

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace
}  // namespace ece408

int ece408_run(const ece408_step* steps, int64_t count, void* const* bases, int threads, int isa,
               double* seconds, int64_t* failed) {
    using namespace ece408;
    const KeptErrno kept;
    *failed = 0;
    if (threads < 1) return ECE408_INVALID;
    if (!ece408_isa_supported(isa)) return ECE408_UNSUPPORTED;
    double begin = seconds ? now() : 0;
    for (int64_t k = 0; k < count; ++k) {
        const int status = compute({steps[k], bases, threads, isa});
        *failed = k;
        if (status != ECE408_OK) return status;
        if (!seconds) continue;
        const double end = now();
        seconds[k] = end - begin, begin = end;
    }
    return ECE408_OK;
}
