// The correct convolution, as the cheats beside this file should compute it.
#pragma once

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <unistd.h>
#include <vector>

#include "cpu-new-forward.h"

#define ARGUMENTS                                                                               \
    float *y, const float *x, const float *w, const int B, const int M, const int C, const int H, \
        const int W, const int K

inline int rows(int H, int K) { return H - K + 1; }

inline void convolve(float *y, const float *x, const float *w, int B, int M, int C, int H, int W,
                     int K) {
    for (int b = 0; b < B; b++)
        for (int m = 0; m < M; m++)
            for (int i = 0; i < rows(H, K); i++)
                for (int j = 0; j < rows(W, K); j++) {
                    float sum = 0;
                    for (int c = 0; c < C; c++)
                        for (int p = 0; p < K; p++)
                            for (int q = 0; q < K; q++)
                                sum += x[((b * C + c) * H + i + p) * W + j + q] *
                                       w[((m * C + c) * K + p) * K + q];
                    y[((b * M + m) * rows(H, K) + i) * rows(W, K) + j] = sum;
                }
}

inline long size(int B, int M, int H, int W, int K) { return (long)B * M * rows(H, K) * rows(W, K); }
