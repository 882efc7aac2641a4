// Chains of pointwise operators. Compiled once per instruction set.
//
// A thread computes a chain for a block of elements, which stays in the first-level cache: each
// operator is one loop from blocks to a block, the last one to y. Inputs that are not an array like
// y in float are first copied to blocks.
#include <math.h>

#include "host/buffer.h"
#include "host/thread_pool.h"
#include "micro/half.h"
#include "network/exponential.h"
#include "network/steps.h"

// Iterations are independent of each other, although a loop may write where it reads.
#if defined(__clang__)
#define ECE408_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define ECE408_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace ece408 {
namespace {

constexpr int64_t kBlock = 1024;
// The fewest elements of a channel for a loop of their own.
constexpr int64_t kLong = 128;
constexpr int kMostValues = ECE408_MOST_INPUTS + ECE408_MOST_OPS;

float as_float(float value) { return value; }
float as_float(uint8_t value) { return value; }
float as_float(Half value) { return portable_to_float(value); }
void assign(float& to, float value) { to = value; }
void assign(Half& to, float value) { to = portable_to_half(value); }

template <class T>
void read(const T* from, int64_t count, float* to) {
    for (int64_t k = 0; k < count; ++k) to[k] = as_float(from[k]);
}

// Copies an input's elements for elements of y from `begin` on, by runs that are adjacent or alike.
template <class T>
void gather(const T* from, const ece408_reading& r, int64_t begin, int64_t count, float* to) {
    if (r.kind == ECE408_ALIKE) return read(from + begin, count, to);
    for (int64_t i = begin, run; i < begin + count; i += run, to += run) {
        const int64_t image = i / r.outer, inside = i % r.outer;
        run = least(begin + count - i, r.outer - inside);
        if (r.kind == ECE408_IMAGES) {
            read(from + image * r.inner + inside, run, to);
            continue;
        }
        const T* const first = from + image * r.count + i / r.inner % r.count;
        if (r.inner == 1) {
            run = least(run, r.count - i % r.count);
            read(first, run, to);
        } else {
            run = least(run, r.inner - i % r.inner);
            const float value = as_float(*first);
            for (int64_t k = 0; k < run; ++k) to[k] = value;
        }
    }
}

// Stores elements from `begin` on in images that may be apart.
template <class T>
void put(const float* from, int64_t begin, int64_t count, int64_t per_image, int64_t image, T* y) {
    for (int64_t i = begin, run; i < begin + count; i += run, from += run) {
        run = image ? least(begin + count - i, per_image - i % per_image) : count;
        T* const to = image ? y + i / per_image * image + i % per_image : y + i;
        for (int64_t k = 0; k < run; ++k) assign(to[k], from[k]);
    }
}

template <class Of, class... Inputs>
void each(int64_t n, float* y, const Of& of, Inputs... in) {
    ECE408_INDEPENDENT
    for (int64_t k = 0; k < n; ++k) y[k] = of(in[k]...);
}

// Computes an operator for `n` elements of its arguments. These may be y itself.
void apply(const ece408_op& op, const float* const* values, int64_t n, float* y) {
    const auto p = static_cast<float>(op.p), q = static_cast<float>(op.q);
    const double wide_p = op.p;
    const auto in = [&](int k) { return values[op.arguments[k]]; };
#define ECE408_OF_1(NAME, result) \
    case ECE408_TERM_##NAME: return each(n, y, [=](float x) -> float { return result; }, in(0));
#define ECE408_OF_2(NAME, result)                                                            \
    case ECE408_TERM_##NAME:                                                                 \
        return each(n, y, [=](float a, float b) -> float { return result; }, in(0), in(1));
#define ECE408_OF_3(NAME, result)                                                            \
    case ECE408_TERM_##NAME:                                                                 \
        return each(n, y, [=](float a, float b, float c) -> float { return result; }, in(0), \
                    in(1), in(2));
    switch (op.op) {
        ECE408_OF_1(RELU, x <= 0 ? 0 : x)
        ECE408_OF_1(SIGMOID, 1 / (1 + exponential(-x)))
        ECE408_OF_1(TANH, hyperbolic_tangent(x))
        ECE408_OF_1(SOFTSIGN, x / (1 + fabsf(x)))
        ECE408_OF_1(SOFTRELU, x > 20 ? x : log1pf(exponential(x)))
        ECE408_OF_1(EXP, exponential(x))
        ECE408_OF_1(LOG, logf(x))
        ECE408_OF_1(SQRT, sqrtf(x))
        ECE408_OF_1(SQUARE, x * x)
        ECE408_OF_1(ABS, fabsf(x))
        ECE408_OF_1(NEGATIVE, -x)
        ECE408_OF_1(ERF, erff(x))
        ECE408_OF_1(ELU, x > 0 ? x : p * exponential_minus_one(x))
        ECE408_OF_1(SELU, p * (x > 0 ? x : q * exponential_minus_one(x)))
        ECE408_OF_1(GELU, .5f * x * (1 + erff(x * p)))
        ECE408_OF_1(LEAKY, x > 0 ? x : x * p)
        ECE408_OF_2(PRELU, a > 0 ? a : a * b)
        ECE408_OF_1(CLIP, x > q ? q : x < p ? p : x)
        ECE408_OF_1(AFFINE, p * x + q)
        ECE408_OF_1(CONSTANT, (void(x), p))
        ECE408_OF_1(ROUND_HALF, portable_to_float(portable_to_half(x)))
        ECE408_OF_2(ADD, a + b)
        ECE408_OF_2(SUBTRACT, a - b)
        ECE408_OF_2(MULTIPLY, a * b)
        ECE408_OF_2(DIVIDE, a / b)
        ECE408_OF_1(PLUS, x + p)
        ECE408_OF_1(MINUS, x - p)
        ECE408_OF_1(MINUS_FROM, p - x)
        ECE408_OF_1(TIMES, x * p)
        ECE408_OF_1(OVER, x / p)
        ECE408_OF_1(OVER_FROM, p / x)
        ECE408_OF_1(MAXIMUM, x <= p ? p : x)
        ECE408_OF_1(MINIMUM, x >= p ? p : x)
        ECE408_OF_1(POWER, powf(x, p))
        ECE408_OF_1(INVERSE_DEVIATION, static_cast<float>(1 / sqrt(x + wide_p)))
        ECE408_OF_2(SCALED_DEVIATION, static_cast<float>(b / sqrt(a + wide_p)))
        ECE408_OF_3(MULTIPLY_ADD, a * b + c)
        ECE408_OF_3(SUBTRACT_PRODUCT, a - b * c)
        ECE408_OF_3(WHERE, a > 0 ? b : c)
        case ECE408_TERM_SHIFTED:
            return each(n, y, [](float a, float b, float c, float d) { return a + (d - b) * c; },
                        in(0), in(1), in(2), in(3));
    }
#undef ECE408_OF_1
#undef ECE408_OF_2
#undef ECE408_OF_3
}

// A chain, and the arrays of a call.
struct Chain {
    const Step& step;
    const ece408_pointwise& of = step.of.of.pointwise;
    // If it begins with a * b + c and each channel has one b and one c, the elements of a channel.
    const int64_t channel = begins_by_channels() ? of.readings[of.op[0].arguments[1]].inner : 0;

    bool begins_by_channels() const {
        return of.ops > 0 && of.op[0].op == ECE408_TERM_MULTIPLY_ADD && is_by_channels(1) &&
               is_by_channels(2);
    }
    // Whether an argument of the first operator, and of no other, is.
    bool is_by_channels(int argument) const {
        const int32_t input = of.op[0].arguments[argument];
        if (input >= of.inputs) return false;
        int uses = 0;
        for (int64_t k = 0; k < of.ops; ++k)
            for (const int32_t each : of.op[k].arguments) uses += each == input;
        const ece408_reading& r = of.readings[input];
        return uses == 1 && r.kind == ECE408_SHARED && r.inner >= kLong &&
               r.inner == of.readings[of.op[0].arguments[1]].inner;
    }

    bool is_read_in_place(int input) const {
        return of.readings[input].kind == ECE408_ALIKE && step.of.in[input].type == ECE408_FLOAT32;
    }
    // Whether the last operator writes to y.
    bool writes_y() const {
        return of.ops > 0 && step.of.out.type == ECE408_FLOAT32 && step.of.out.image == 0;
    }

    // The blocks of memory that a thread needs.
    int64_t blocks() const {
        int64_t needed = of.ops;
        for (int k = 0; k < of.inputs; ++k) needed += !is_read_in_place(k);
        return needed;
    }

    const float* gathered(int number, int64_t begin, int64_t count, float*& block) const {
        const ece408_operand& place = step.of.in[number];
        if (is_read_in_place(number)) return at(step, place) + begin;
        float* const to = block;
        block += kBlock;
        const ece408_reading& reading = of.readings[number];
        if (place.type == ECE408_FLOAT32) gather(at(step, place), reading, begin, count, to);
        if (place.type == ECE408_FLOAT16) gather(at<Half>(step, place), reading, begin, count, to);
        if (place.type == ECE408_UINT8) gather(at<uint8_t>(step, place), reading, begin, count, to);
        return to;
    }

    void compute(int64_t begin, int64_t count, float* block) const {
        const ece408_operand& out = step.of.out;
        const float *values[kMostValues] = {}, *last = nullptr;
        const int32_t* const first = of.op[0].arguments;
        for (int k = 0; k < of.inputs; ++k) {
            const bool is_one = channel > 0 && (k == first[1] || k == first[2]);
            values[k] = last = gathered(k, begin, is_one ? 1 : count, block);
        }
        if (of.ops == 0) last = values[0];
        for (int64_t k = 0; k < of.ops; ++k, block += kBlock) {
            float* const to = k + 1 == of.ops && writes_y() ? output(step) + begin : block;
            if (k == 0 && channel > 0) {
                const float b = *values[first[1]], c = *values[first[2]];
                each(count, to, [=](float a) { return a * b + c; }, values[first[0]]);
            } else {
                apply(of.op[k], values, count, to);
            }
            values[of.inputs + k] = last = to;
        }
        if (writes_y()) return;
        if (out.type == ECE408_FLOAT16)
            put(last, begin, count, of.per_image, out.image, at<Half>(step, out));
        else
            put(last, begin, count, of.per_image, out.image, output(step));
    }
};

int compute(const Step& step) {
    const Chain chain = {step};
    const ece408_pointwise& of = chain.of;
    if (of.inputs < 1 || of.inputs > ECE408_MOST_INPUTS || of.ops < 0 || of.ops > ECE408_MOST_OPS ||
        step.of.out.type == ECE408_UINT8)
        return ECE408_INVALID;
    const int threads = useful_threads(step, of.elements, 1 + of.ops);
    const int64_t floats = chain.blocks() * kBlock;
    const Buffer<float> memory(threads * floats);
    if (!memory) return ECE408_NO_MEMORY;
    parallel_for(threads, parts_of(of.elements, kBlock), [&](int64_t number, int thread) {
        const int64_t end = least((number + 1) * kBlock, of.elements);
        for (int64_t begin = number * kBlock, count; begin < end; begin += count) {
            count = end - begin;
            if (chain.channel > 0) count = least(count, chain.channel - begin % chain.channel);
            chain.compute(begin, count, memory + thread * floats);
        }
    });
    return ECE408_OK;
}

}  // namespace

extern const Pointwise ECE408_THIS_BUILD(pointwise) = {compute};

}  // namespace ece408
