// Writes files without end.
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>

#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    for (int n = 0;; n++) {
        const std::string name = std::string(getenv("TMPDIR")) + "/" + std::to_string(n);
        std::ofstream file(name);
        file << std::string(8 << 20, 'x') << std::flush;
        if (!file) throw std::runtime_error("no file");
    }
}
