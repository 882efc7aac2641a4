// The macros of a layer; by default the second convolution of term 2019fa.
#pragma once

#ifndef CHANNELS
#define CHANNELS 12
#define FILTERS 24
#endif
#ifndef HEIGHT
#define HEIGHT 33
#define WIDTH 33
#endif
#ifndef KERNEL_H
#define KERNEL_H 5
#define KERNEL_W 5
#endif
#ifndef STRIDE_H
#define STRIDE_H 1
#define STRIDE_W 1
#define PAD_H 0
#define PAD_W 0
#endif
#ifndef DILATE_H
#define DILATE_H 1
#define DILATE_W 1
#endif

__host__ __device__ constexpr int divide_up(int count, int size) {
    return count / size + (count % size != 0);
}
