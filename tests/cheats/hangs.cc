// Never returns.
#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    for (volatile int i = 1; i;) {
    }
}
