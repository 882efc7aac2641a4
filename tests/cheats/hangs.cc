// Never returns, and takes no core.
#include <unistd.h>
#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    for (;;) pause();
}
