// Elements put elsewhere: y[i0, i1 ...] = x[...], of arrays of up to six axes, where x is read by
// strides of its own along the axes of y. So it transposes, repeats, cuts out and puts borders
// around images.
#ifndef BORDER
#define BORDER ZERO  // what is beyond x: FILL, or its NEAREST element, or those MIRRORED
#endif
#ifndef FILL
#define FILL 0.f
#endif
#define ZERO 0
#define NEAREST 1
#define MIRRORED 2

// An axis of y: `first` of its places lie before x, which has `held` of them, `stride` apart.
#define AXIS(k) int size##k, int first##k, int held##k, int stride##k
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

// The last axis is axis 0.
extern "C" __global__ void __launch_bounds__(256)
    strided_copy(float *y, const float *x, int elements, AXIS(0), AXIS(1), AXIS(2), AXIS(3),
                 AXIS(4), AXIS(5)) {
    const unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (i >= elements) return;
    unsigned rest = i;
    long long at = 0;
    bool inside = true;
    PLACE(0)
    PLACE(1)
    PLACE(2)
    PLACE(3)
    PLACE(4)
    PLACE(5)
    y[i] = inside ? x[at] : FILL;
}
