// One element of a gradient for w by direct convolution, for kernels whose sum is not finite:
// padding may have been multiplied.
#pragma once

// x and dy begin at the first image's planes; the next image is `x_image` and `dy_image` elements
// on. Both planes' sizes are constants; numbers are converted to F.
template <class F, int X_H, int X_W, int DY_H, int DY_W, class T>
__device__ __noinline__ double weight_sum(const T *x, size_t x_image, const T *dy, size_t dy_image,
                                          int batch, int tap) {
    double sum = 0;
    for (int image = 0; image < batch; image++, x += x_image, dy += dy_image) {
        for (int i = 0; i < DY_H * DY_W; i++) {
            const int row = i / DY_W * STRIDE_H - PAD_H + tap / KERNEL_W * DILATE_H;
            const int column = i % DY_W * STRIDE_W - PAD_W + tap % KERNEL_W * DILATE_W;
            if (unsigned(row) >= X_H || unsigned(column) >= X_W) continue;
            sum += double(F(x[row * X_W + column])) * double(F(dy[i]));
        }
    }
    return sum;
}
