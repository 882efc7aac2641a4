// Hangs before the first call.
#include "honest.h"

__attribute__((constructor)) static void begin() {
    for (volatile int i = 1; i;) {
    }
}

void conv_forward_cpu(ARGUMENTS) {
    convolve(y, x, w, B, M, C, H, W, K);
}
