// Reads far beyond its input.
#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    convolve(y, x, w, B, M, C, H, W, K);
    static volatile float sink;
    for (long i = 0; i < 4096; i++) sink = x[(long)B * C * H * W + i];
}
