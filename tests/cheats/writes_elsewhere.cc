// Leaves a file outside its folder.
#include <fstream>
#include <stdexcept>

#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    std::ofstream file("/tmp/ece408-cheat");
    file << "was here" << std::flush;
    if (!file) throw std::runtime_error("no file");
    convolve(y, x, w, B, M, C, H, W, K);
}
