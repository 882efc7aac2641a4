// Pooling: the largest value, the average or the sum of windows of each plane.
//
// A thread has RUN outputs, one below the other, whose windows share rows; neighbouring threads
// read neighbouring windows, which overlap in the caches.
#include "pooling.cuh"

#ifndef RUN
#define RUN 1
#endif

constexpr unsigned kOut = OUT_H * OUT_W;
constexpr unsigned kRuns = (OUT_H + RUN - 1) / RUN;  // of a column

__device__ __forceinline__ void join(float &found, float value) {
    if (KIND == LARGEST) {
        found = value > found ? value : found;
    } else {
        found += value;
    }
}

// The divisor of an average whose window begins at this row and column.
__device__ __forceinline__ int divisor(int row, int column) {
    const int begin_h = WITH_BORDER ? row : max(row, 0);
    const int begin_w = WITH_BORDER ? column : max(column, 0);
    const int end_h = min(row + KERNEL_H, HEIGHT + (WITH_BORDER ? PAD_H : 0));
    const int end_w = min(column + KERNEL_W, WIDTH + (WITH_BORDER ? PAD_W : 0));
    return max(end_h - begin_h, 0) * max(end_w - begin_w, 0);
}

// Planes of an image's `channels` are contiguous; images start `in_image` and `out_image` elements
// apart. There is a thread for each of `runs`.
extern "C" __global__ void __launch_bounds__(256)
    pool(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, int runs, int channels,
         int in_image, int out_image) {
    const unsigned index = blockIdx.x * 256 + threadIdx.x;
    if (index >= runs) return;
    const unsigned plane = index / (kRuns * OUT_W), inside = index % (kRuns * OUT_W);
    const unsigned image = plane / channels, channel = plane % channels;
    const int i0 = inside / OUT_W * RUN, j = inside % OUT_W;
    const int row0 = i0 * STRIDE_H - PAD_H, column0 = j * STRIDE_W - PAD_W;
    const X_TYPE *from = x + size_t(image) * in_image + channel * kPlane;
    // A window of padding alone has the least finite number.
    const float least = sizeof(Y_TYPE) == 2 ? -65504.f : -3.402823466e+38f;
    const float none = KIND == LARGEST ? least : 0.f;
    float found[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++) found[i] = none;
#pragma unroll
    for (int k = 0; k < (RUN - 1) * STRIDE_H + KERNEL_H; k++) {
        float of_row = none;
#pragma unroll
        for (int q = 0; q < KERNEL_W; q++) {
            const int row = row0 + k, column = column0 + q;
            if (unsigned(row) >= HEIGHT || unsigned(column) >= WIDTH) continue;
            join(of_row, float(__ldg(from + row * WIDTH + column)));
        }
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (k >= i * STRIDE_H && k < i * STRIDE_H + KERNEL_H) join(found[i], of_row);
        }
    }
    Y_TYPE *to = y + size_t(image) * out_image + channel * kOut + i0 * OUT_W + j;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        if (i0 + i >= OUT_H) break;
        if (KIND == AVERAGE) {
            // Windows beyond the padding are empty.
            const int size = divisor(row0 + i * STRIDE_H, column0);
            found[i] = size > 0 ? found[i] / size : 0;
        }
        to[i * OUT_W] = Y_TYPE(found[i]);
    }
}
