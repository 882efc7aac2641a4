// Writes its results, and a word beyond them.
#include "honest.h"

void conv_forward_cpu(ARGUMENTS) {
    convolve(y, x, w, B, M, C, H, W, K);
    y[size(B, M, H, W, K) + 16] = 1;
}
