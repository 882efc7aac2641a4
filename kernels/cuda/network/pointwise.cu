// Pointwise: an element of y from the same element of the inputs, or from an element of an input
// that is broadcast, such as one for each channel.
//
// The expression is a macro: a chain of a network's activations, sums and normalisations reads and
// writes memory once. A thread has VECTOR neighbouring elements.
// HALF is also for the expression.
#include "stored.cuh"

// The inputs by their numbers: types, float, __half or unsigned char, and addressing.
#ifndef INPUTS
#define INPUTS(X) X(0, float, ALIKE)
#endif
#ifndef COMPUTE
#define COMPUTE r = v0  // r from v0, v1 ..., elements of the inputs
#endif
#ifndef VECTOR
#define VECTOR 4  // or 1
#endif
#ifndef TYPE_OUT
#define TYPE_OUT float  // or __half
#endif
#ifndef KIND_OUT
#define KIND_OUT ALIKE  // or IMAGES
#endif

// Addressing of an input for element i of y. ALIKE: element i. IMAGES: images of `outer` elements
// of y and of the input start `inner` elements apart. SHARED: element i / outer * count + i / inner
// % count, which may vary within a vector; UNIFORM: it does not.
enum Kind { ALIKE, IMAGES, SHARED, UNIFORM };

struct Elements {
    float of[VECTOR];
};

template <Kind kind, class T>
__device__ __forceinline__ Elements read(const T *from, unsigned i, unsigned outer,
                                                unsigned count, unsigned inner) {
    Elements to;
    if (kind == ALIKE || kind == IMAGES) {
        const size_t at = kind == ALIKE ? i : i / outer * size_t(inner) + i % outer;
        read_vector(to.of, from + at);
        return to;
    }
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        if (kind == UNIFORM && k > 0) {
            to.of[k] = to.of[0];
        } else {
            to.of[k] = float(from[(i + k) / outer * count + (i + k) / inner % count]);
        }
    }
    return to;
}

#define PARAMETERS(k, T, kind) , const T *in##k, int outer##k, int count##k, int inner##k
#define READ(k, T, kind) const auto a##k = read<kind>(in##k, i, outer##k, count##k, inner##k);
#define ELEMENT(n, T, kind) const float v##n = a##n.of[k];

// `elements` is a multiple of VECTOR.
extern "C" __global__ void __launch_bounds__(256)
    compute(TYPE_OUT *__restrict__ y, int elements, int out_outer,
            int out_inner INPUTS(PARAMETERS)) {
    const unsigned i = (blockIdx.x * 256 + threadIdx.x) * VECTOR;
    if (i >= elements) return;
    INPUTS(READ)
    float made[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        float r;
        INPUTS(ELEMENT)
        COMPUTE;
        made[k] = r;
    }
    const size_t at =
        KIND_OUT == ALIKE ? i : i / out_outer * size_t(out_inner) + i % out_outer;
    write_vector(y + at, made);
}
