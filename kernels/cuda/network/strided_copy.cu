// Copies arrays of up to six axes, with strides of x for each axis of y: it transposes, repeats,
// slices and pads.
#include "stored.cuh"

#ifndef BORDER
#define BORDER ZERO  // elements beyond x: FILL, its NEAREST element, or MIRRORED ones
#define FILL 0.f
#endif
#define ZERO 0
#define NEAREST 1
#define MIRRORED 2

// An axis of y: `first` elements before x, then the `held` elements of x, `stride` apart.
#define AXIS(k) , int size##k, int first##k, int held##k, int stride##k
#define PLACE(k)                                                        \
    {                                                                   \
        int place = int(rest % size##k) - first##k;                     \
        rest /= size##k;                                                \
        if (BORDER == NEAREST) place = min(max(place, 0), held##k - 1); \
        if (BORDER == MIRRORED) {                                       \
            place = place < 0 ? -place : place;                         \
            place = place >= held##k ? 2 * (held##k - 1) - place : place; \
        }                                                               \
        inside = inside && unsigned(place) < held##k;                   \
        at += (long long)place * stride##k;                             \
    }

#define AXES(X) X(0) X(1) X(2) X(3) X(4) X(5)  // the last axis is axis 0

extern "C" __global__ void __launch_bounds__(256)
    strided_copy(X_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, int elements AXES(AXIS)) {
    const unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (i >= elements) return;
    unsigned rest = i;
    long long at = 0;
    bool inside = true;
    AXES(PLACE)
    y[i] = inside ? x[at] : X_TYPE(FILL);
}
