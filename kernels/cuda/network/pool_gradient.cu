// Gradient of pooling, from that of its result.
//
// A thread has two by two elements of x, and adds up the gradients of the windows that contain
// them. Of a window's largest elements the first one gets the gradient: `find` first writes its
// place in the window, by one thread, or by a warp if the window is large. Loads are unconditional,
// so that they do not wait for each other: those outside read another element.
#include "pooling.cuh"

#ifndef PLACE
#define PLACE unsigned char  // a number of an element of a window
#define FINDERS 1  // threads that search a window, or 32
#endif

constexpr unsigned kOut = OUT_H * OUT_W;
constexpr int kElements = KERNEL_H * KERNEL_W, kFinds = FINDERS == 1 ? kElements : 8;
constexpr int kAcross = (WIDTH + 1) / 2, kDown = (HEIGHT + 1) / 2;

// Windows along one axis that contain one of two elements, at most.
constexpr int windows_at(int kernel, int stride, int count) {
    return kernel / stride + 1 < count ? kernel / stride + 1 : count;
}
constexpr int kRows = windows_at(KERNEL_H, STRIDE_H, OUT_H);
constexpr int kColumns = windows_at(KERNEL_W, STRIDE_W, OUT_W);
constexpr int kUnroll = kRows * kColumns <= 16 ? 4 : 1;

// If all of a window's elements are NaN or -inf, the first one inside the plane gets the gradient.
extern "C" __global__ void __launch_bounds__(256)
    find(PLACE *__restrict__ places, const float *__restrict__ x, const float *__restrict__ y,
         int windows) {
    const unsigned index = blockIdx.x * (256 / FINDERS) + threadIdx.x / FINDERS;
    if (index >= windows) return;
    const unsigned inside = index % kOut;
    const float *from = x + size_t(index / kOut) * kPlane;
    const int row0 = int(inside / OUT_W) * STRIDE_H - PAD_H;
    const int column0 = int(inside % OUT_W) * STRIDE_W - PAD_W;
    const float largest = __ldg(y + index);
    int found = kElements;
#pragma unroll kFinds
    for (int n = threadIdx.x % FINDERS; n < kElements; n += FINDERS) {
        const int row = row0 + n / KERNEL_W, column = column0 + n % KERNEL_W;
        const bool is_inside = unsigned(row) < HEIGHT && unsigned(column) < WIDTH;
        const float value = __ldg(from + (is_inside ? row * WIDTH + column : 0));
        if (is_inside && value == largest) found = min(found, n);
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
    pool_gradient(float *__restrict__ dx, const float *__restrict__ dy,
                  const PLACE *__restrict__ places, int threads) {
    const unsigned index = blockIdx.x * 256 + threadIdx.x;
    if (index >= threads) return;
    const unsigned plane = index / (kAcross * kDown), inside = index % (kAcross * kDown);
    const int row = inside / kAcross * 2, column = inside % kAcross * 2;
    const size_t first = size_t(plane) * kOut;
    float sums[4] = {};
#pragma unroll kUnroll
    for (int a = 0; a < kRows; a++) {
#pragma unroll kUnroll
        for (int b = 0; b < kColumns; b++) {
            const int i = min((row + 1 + PAD_H) / STRIDE_H, OUT_H - 1) - a;
            const int j = min((column + 1 + PAD_W) / STRIDE_W, OUT_W - 1) - b;
            const bool exists = i >= 0 && j >= 0;
            const size_t window = first + (exists ? i * OUT_W + j : 0);
            const int row0 = i * STRIDE_H - PAD_H, column0 = j * STRIDE_W - PAD_W;
            const int place = KIND == LARGEST ? __ldg(places + window) : 0;
            const int its_row = row0 + place / KERNEL_W, its_column = column0 + place % KERNEL_W;
            float gradient = __ldg(dy + window);
            if (KIND == AVERAGE) {
                gradient /= length(row0, KERNEL_H, HEIGHT, PAD_H) *
                            length(column0, KERNEL_W, WIDTH, PAD_W);
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int r = row + n / 2, c = column + n % 2;
                const bool takes = KIND == LARGEST
                                       ? r == its_row && c == its_column
                                       : unsigned(r - row0) < KERNEL_H &&
                                             unsigned(c - column0) < KERNEL_W;
                if (exists && takes) sums[n] += gradient;
            }
        }
    }
    float *to = dx + size_t(plane) * kPlane + row * WIDTH + column;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int r = n / 2, c = n % 2;
        if (row + r < HEIGHT && column + c < WIDTH) to[r * WIDTH + c] = sums[n];
    }
}
