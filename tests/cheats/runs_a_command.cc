// Runs another program.
#include <cstdlib>
#include <stdexcept>

#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    if (system("true") != 0) throw std::runtime_error("no command");
    convolve(y, x, w, B, M, C, H, W, K);
}
