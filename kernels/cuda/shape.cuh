// The layer that a file is compiled for: stride 1, no padding, one group. By default it is the
// second convolution of term 2019fa.
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

constexpr int kOutH = HEIGHT - KERNEL_H + 1;
constexpr int kOutW = WIDTH - KERNEL_W + 1;
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr unsigned kPlane = HEIGHT * WIDTH;       // pixels of a channel
constexpr unsigned kOutPlane = kOutH * kOutW;     // pixels of a filter's output
constexpr unsigned kImage = CHANNELS * kPlane;    // elements of one image of x
constexpr unsigned kOutImage = FILTERS * kOutPlane;  // and of y

__host__ __device__ constexpr int divide_up(int count, int size) {
    return (count + size - 1) / size;
}
