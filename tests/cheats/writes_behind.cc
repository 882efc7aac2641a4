// Writes its results, and a word beyond them.
#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    convolve(y, x, w, B, M, C, H, W, K);
    y[size(B, M, H, W, K) + 16] = 1;
}
