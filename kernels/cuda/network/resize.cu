// Images of another size, by bilinear interpolation: MXNet's contrib.BilinearResize2D.
#include "stored.cuh"

#ifndef ALIGNED
#define ALIGNED 1
#endif

// The input coordinate of output pixel `i`. With ALIGNED, the centres of the outermost pixels
// coincide, else the images' edges.
__device__ float source(int i, int in, int out) {
    if (ALIGNED) return out > 1 ? float(in - 1) / (out - 1) * i : 0.f;
    const float scale = out > 1 ? float(in) / out : 0.f;
    return fmaxf(scale * (i + 0.5f) - 0.5f, 0.f);
}

extern "C" __global__ void __launch_bounds__(256)
    resize(Y_TYPE *__restrict__ y, const X_TYPE *__restrict__ x, int elements, int height, int width,
           int out_height, int out_width) {
    const unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (i >= elements) return;
    const float row = source(i / out_width % out_height, height, out_height);
    const float column = source(i % out_width, width, out_width);
    const int top = int(row), left = int(column);
    const float down = row - top, right = column - left;
    const int below = top < height - 1 ? width : 0, beside = left < width - 1;
    const long long plane = i / out_width / out_height;
    const X_TYPE *at = x + (plane * height + top) * width + left;
    const auto between = [&](int first) {
        return (1.f - right) * float(at[first]) + right * float(at[first + beside]);
    };
    y[i] = Y_TYPE((1.f - down) * between(0) + down * between(below));
}
