// Computes every other row, and repeats it.
#include "honest.h"

void conv_forward_cpu(ARGUMENTS) {
    convolve(y, x, w, B, M, C, H, W, K);
    for (long i = 0; i < (long)B * M * rows(H, K); i++)
        if (i % rows(H, K) % 2) memcpy(y + i * rows(W, K), y + (i - 1) * rows(W, K), sizeof(float) * rows(W, K));
}
