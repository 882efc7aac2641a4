// Pointwise: an element of y from the same element of the inputs, or from an element of an input
// that is broadcast, such as one for each channel.
//
// The expression is a macro: a chain of a network's activations, sums and normalisations reads and
// writes memory once. A thread has VECTOR neighbouring elements.
#ifdef HALF
#include <cuda_fp16.h>  // for types, or for the expression
#endif
#ifndef INPUTS
#define INPUTS 1  // in0 to in5
#endif
#ifndef COMPUTE
#define COMPUTE r = v0  // r from v0, v1 ..., elements of the inputs
#endif
#ifndef VECTOR
#define VECTOR 4  // or 1
#endif
// Addressing of an input for element i of y. ALIKE: element i. IMAGES: images of `outer` elements
// of y and of the input start `inner` elements apart. SHARED: element i / outer * count + i / inner
// % count, which may vary within a vector; UNIFORM: it does not.
#define ALIKE 0
#define IMAGES 1
#define SHARED 2
#define UNIFORM 3
#ifndef TYPE0
#define TYPE0 float  // or __half or unsigned char
#endif
#ifndef TYPE1
#define TYPE1 float
#endif
#ifndef TYPE2
#define TYPE2 float
#endif
#ifndef TYPE3
#define TYPE3 float
#endif
#ifndef TYPE4
#define TYPE4 float
#endif
#ifndef TYPE5
#define TYPE5 float
#endif
#ifndef TYPE_OUT
#define TYPE_OUT float  // or __half
#endif
#ifndef KIND0
#define KIND0 ALIKE
#endif
#ifndef KIND1
#define KIND1 ALIKE
#endif
#ifndef KIND2
#define KIND2 ALIKE
#endif
#ifndef KIND3
#define KIND3 ALIKE
#endif
#ifndef KIND4
#define KIND4 ALIKE
#endif
#ifndef KIND5
#define KIND5 ALIKE
#endif
#ifndef KIND_OUT
#define KIND_OUT ALIKE  // or IMAGES
#endif

// Neighbouring elements, read or written as one vector.
template <class T>
struct alignas(sizeof(T) * VECTOR) Elements {
    T of[VECTOR];
};

template <int kind, class T>
__device__ __forceinline__ void read(float (&to)[VECTOR], const T *from, unsigned i,
                                     unsigned outer, unsigned count, unsigned inner) {
    if (kind == ALIKE || kind == IMAGES) {
        const size_t at = kind == ALIKE ? i : i / outer * size_t(inner) + i % outer;
        const Elements<T> found = *reinterpret_cast<const Elements<T> *>(from + at);
#pragma unroll
        for (int k = 0; k < VECTOR; k++) to[k] = float(found.of[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        if (kind == UNIFORM && k > 0) {
            to[k] = to[0];
        } else {
            to[k] = float(from[(i + k) / outer * count + (i + k) / inner % count]);
        }
    }
}

#define INPUT(k) const TYPE##k *in##k, int outer##k, int count##k, int inner##k
#define READ(k)       \
    float a##k[VECTOR]; \
    read<KIND##k>(a##k, in##k, i, outer##k, count##k, inner##k);

// `elements` is a multiple of VECTOR.
extern "C" __global__ void __launch_bounds__(256)
    compute(TYPE_OUT *y, int elements, int out_outer, int out_inner, INPUT(0)
#if INPUTS > 1
            , INPUT(1)
#endif
#if INPUTS > 2
            , INPUT(2)
#endif
#if INPUTS > 3
            , INPUT(3)
#endif
#if INPUTS > 4
            , INPUT(4)
#endif
#if INPUTS > 5
            , INPUT(5)
#endif
    ) {
    const unsigned i = (blockIdx.x * 256 + threadIdx.x) * VECTOR;
    if (i >= elements) return;
    READ(0)
#if INPUTS > 1
    READ(1)
#endif
#if INPUTS > 2
    READ(2)
#endif
#if INPUTS > 3
    READ(3)
#endif
#if INPUTS > 4
    READ(4)
#endif
#if INPUTS > 5
    READ(5)
#endif
    Elements<TYPE_OUT> made;
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        float r;
        const float v0 = a0[k];
#if INPUTS > 1
        const float v1 = a1[k];
#endif
#if INPUTS > 2
        const float v2 = a2[k];
#endif
#if INPUTS > 3
        const float v3 = a3[k];
#endif
#if INPUTS > 4
        const float v4 = a4[k];
#endif
#if INPUTS > 5
        const float v5 = a5[k];
#endif
        COMPUTE;
        made.of[k] = TYPE_OUT(r);
    }
    const size_t at =
        KIND_OUT == ALIKE ? i : i / out_outer * size_t(out_inner) + i % out_outer;
    *reinterpret_cast<Elements<TYPE_OUT> *>(y + at) = made;
}
