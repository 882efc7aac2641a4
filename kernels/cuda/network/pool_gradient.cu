// Gradient of pooling, from that of its result.
//
// A thread has an element of x, and adds up the gradients of the windows that contain it. Of a
// window's largest elements the first one gets the gradient: `find` first writes its place in the
// window, by one thread, or by a warp if the window is large.
#include "shape.cuh"

#define LARGEST 0
#define AVERAGE 1
#define SUM 2
#ifndef KIND
#define KIND LARGEST
#endif
#ifndef WITH_BORDER
#define WITH_BORDER 1  // an average counts the padding's zeros
#endif
#ifndef OUT_H
#define OUT_H kOutH
#endif
#ifndef OUT_W
#define OUT_W kOutW
#endif
#ifndef PLACE
#define PLACE unsigned char  // a number of an element of a window
#endif
#ifndef FINDERS
#define FINDERS 1  // threads that search a window, or 32
#endif

constexpr unsigned kOut = OUT_H * OUT_W;
constexpr int kElements = KERNEL_H * KERNEL_W;

// Windows along one axis that contain an element, at most.
constexpr int windows_at(int kernel, int stride, int count) {
    const int all = (kernel + stride - 1) / stride;
    return all < count ? all : count;
}
constexpr int kRows = windows_at(KERNEL_H, STRIDE_H, OUT_H);
constexpr int kColumns = windows_at(KERNEL_W, STRIDE_W, OUT_W);
constexpr int kUnroll = kRows * kColumns <= 16 ? 4 : 1;

// If all of a window's elements are NaN or -inf, the first one inside the plane gets the gradient.
extern "C" __global__ void __launch_bounds__(256)
    find(PLACE *places, const float *x, const float *y, int windows) {
    const unsigned index = (blockIdx.x * 256 + threadIdx.x) / FINDERS;
    if (index >= windows) return;
    const unsigned inside = index % kOut;
    const float *from = x + size_t(index / kOut) * kPlane;
    const int row0 = int(inside / OUT_W) * STRIDE_H - PAD_H;
    const int column0 = int(inside % OUT_W) * STRIDE_W - PAD_W;
    const float largest = __ldg(y + index);
    int found = kElements;
#pragma unroll 8
    for (int n = threadIdx.x % FINDERS; n < kElements; n += FINDERS) {
        const int row = row0 + n / KERNEL_W, column = column0 + n % KERNEL_W;
        if (unsigned(row) >= HEIGHT || unsigned(column) >= WIDTH) continue;
        if (__ldg(from + row * WIDTH + column) == largest) found = min(found, n);
    }
#pragma unroll
    for (int step = FINDERS / 2; step > 0; step /= 2) {
        found = min(found, __shfl_xor_sync(0xffffffffu, found, step));
    }
    if (found == kElements) found = max(-row0, 0) * KERNEL_W + max(-column0, 0);
    if (threadIdx.x % FINDERS == 0) places[index] = found;
}

// Elements of a window for an average, along one axis.
__device__ int length(int first, int kernel, int size, int pad) {
    return min(first + kernel, size + WITH_BORDER * pad) - (WITH_BORDER ? first : max(first, 0));
}

extern "C" __global__ void __launch_bounds__(256)
    pool_gradient(float *dx, const float *dy, const PLACE *places, int elements) {
    const unsigned index = blockIdx.x * 256 + threadIdx.x;
    if (index >= elements) return;
    const unsigned inside = index % kPlane;
    const size_t first = size_t(index / kPlane) * kOut;
    // From the border's first element on.
    const int row = inside / WIDTH + PAD_H, column = inside % WIDTH + PAD_W;
    float sum = 0;
#pragma unroll kUnroll
    for (int a = 0; a < kRows; a++) {
#pragma unroll kUnroll
        for (int b = 0; b < kColumns; b++) {
            const int i = min(row / STRIDE_H, OUT_H - 1) - a;
            const int j = min(column / STRIDE_W, OUT_W - 1) - b;
            const int p = row - i * STRIDE_H, q = column - j * STRIDE_W;
            if (i < 0 || j < 0 || p >= KERNEL_H || q >= KERNEL_W) continue;
            const size_t window = first + i * OUT_W + j;
            if (KIND == LARGEST && __ldg(places + window) != p * KERNEL_W + q) continue;
            const float gradient = __ldg(dy + window);
            if (KIND == AVERAGE) {
                sum += gradient / (length(i * STRIDE_H - PAD_H, KERNEL_H, HEIGHT, PAD_H) *
                                   length(j * STRIDE_W - PAD_W, KERNEL_W, WIDTH, PAD_W));
            } else {
                sum += gradient;
            }
        }
    }
    dx[index] = sum;
}
