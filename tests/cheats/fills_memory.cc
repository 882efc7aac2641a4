// Takes all memory.
#include <cstdlib>
#include <cstring>
#include <new>

#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    for (;;) {
        char *part = (char *)malloc(1 << 28);
        if (!part) throw std::bad_alloc();
        memset(part, 1, 1 << 28);
    }
}
