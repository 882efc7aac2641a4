// The macros of a layer; by default the second convolution of term 2019fa.
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
