// Reads far beyond its input.
#include "honest.h"

void conv_forward_cpu(ARGUMENTS) {
    convolve(y, x, w, B, M, C, H, W, K);
    static volatile float sink;
    for (long i = 0; i < 4096; i++) sink = x[(long)B * C * H * W + i];
}
