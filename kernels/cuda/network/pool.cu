// Pooling: the largest value, the average or the sum of windows of each plane.
//
// A thread has an output; neighbouring threads read neighbouring windows, which overlap in the
// caches.
#include "pooling.cuh"

constexpr unsigned kOut = OUT_H * OUT_W;

// Planes of an image's `channels` are contiguous; images start `in_image` and `out_image` elements
// apart.
extern "C" __global__ void __launch_bounds__(256)
    pool(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, int outputs, int channels,
         int in_image, int out_image) {
    const unsigned index = blockIdx.x * 256 + threadIdx.x;
    if (index >= outputs) return;
    const unsigned plane = index / kOut, inside = index % kOut;
    const unsigned image = plane / channels, channel = plane % channels;
    const X_TYPE *from = x + size_t(image) * in_image + channel * kPlane;
    const int row0 = int(inside / OUT_W) * STRIDE_H - PAD_H;
    const int column0 = int(inside % OUT_W) * STRIDE_W - PAD_W;
    // A window of padding alone has the least finite number.
    const float least = sizeof(Y_TYPE) == 2 ? -65504.f : -3.402823466e+38f;
    float found = KIND == LARGEST ? least : 0.f;
#pragma unroll
    for (int p = 0; p < KERNEL_H; p++) {
#pragma unroll
        for (int q = 0; q < KERNEL_W; q++) {
            const int row = row0 + p, column = column0 + q;
            if (unsigned(row) >= HEIGHT || unsigned(column) >= WIDTH) continue;
            const float value = float(__ldg(from + row * WIDTH + column));
            if (KIND == LARGEST) {
                found = value > found ? value : found;
            } else {
                found += value;
            }
        }
    }
    if (KIND == AVERAGE) {
        const int begin_h = WITH_BORDER ? row0 : max(row0, 0);
        const int begin_w = WITH_BORDER ? column0 : max(column0, 0);
        const int end_h = min(row0 + KERNEL_H, HEIGHT + (WITH_BORDER ? PAD_H : 0));
        const int end_w = min(column0 + KERNEL_W, WIDTH + (WITH_BORDER ? PAD_W : 0));
        // Windows beyond the padding are empty.
        const int size = max(end_h - begin_h, 0) * max(end_w - begin_w, 0);
        found = size > 0 ? found / size : 0;
    }
    y[size_t(image) * out_image + channel * kOut + inside] = Y_TYPE(found);
}
