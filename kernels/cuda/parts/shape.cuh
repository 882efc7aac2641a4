// The layer that a file is compiled for, of one group; by default the second convolution of term
// 2019fa. Strides, padding and dilation work only in files that say so.
#pragma once

#ifndef CHANNELS
#define CHANNELS 12
#endif
#ifndef HEIGHT
#define HEIGHT 33
#endif
#ifndef WIDTH
#define WIDTH 33
#endif
#ifndef FILTERS
#define FILTERS 24
#endif
#ifndef KERNEL_H
#define KERNEL_H 5
#endif
#ifndef KERNEL_W
#define KERNEL_W 5
#endif
#ifndef STRIDE_H
#define STRIDE_H 1
#endif
#ifndef STRIDE_W
#define STRIDE_W 1
#endif
#ifndef PAD_H
#define PAD_H 0
#endif
#ifndef PAD_W
#define PAD_W 0
#endif
#ifndef DILATE_H
#define DILATE_H 1
#endif
#ifndef DILATE_W
#define DILATE_W 1
#endif

constexpr int kOutH = (HEIGHT + 2 * PAD_H - (KERNEL_H - 1) * DILATE_H - 1) / STRIDE_H + 1;
constexpr int kOutW = (WIDTH + 2 * PAD_W - (KERNEL_W - 1) * DILATE_W - 1) / STRIDE_W + 1;
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr unsigned kPlane = HEIGHT * WIDTH;       // pixels of a channel
constexpr unsigned kOutPlane = kOutH * kOutW;     // pixels of a filter's output
constexpr unsigned kImage = CHANNELS * kPlane;    // elements of one image of x
#ifndef OUT_IMAGE
#define OUT_IMAGE (FILTERS * kOutPlane)
#endif
constexpr unsigned kOutImage = OUT_IMAGE;  // elements of y between images

__host__ __device__ constexpr int divide_up(int count, int size) {
    return (count + size - 1) / size;
}
