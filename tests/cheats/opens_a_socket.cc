// Opens a connection to another machine.
#include <stdexcept>
#include <sys/socket.h>

#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    if (socket(AF_INET, SOCK_STREAM, 0) < 0) throw std::runtime_error("no socket");
    convolve(y, x, w, B, M, C, H, W, K);
}
