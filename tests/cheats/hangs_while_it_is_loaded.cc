// Hangs before the first call.
#include "honest.h"

__attribute__((constructor)) static void begin() {
    for (volatile int i = 1; i;) {
    }
}

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    convolve(y, x, w, B, M, C, H, W, K);
}
