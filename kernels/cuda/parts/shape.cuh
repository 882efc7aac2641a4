// The layer that a file is compiled for, of one group (layer.cuh). Strides, padding and dilation
// work only in files that say so.
#pragma once

#include "layer.cuh"

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
