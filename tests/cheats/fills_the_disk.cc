// Writes files without end.
#include "honest.h"

void conv_forward_cpu(ARGUMENTS) {
    for (int n = 0;; n++) {
        const std::string name = std::string(getenv("TMPDIR")) + "/" + std::to_string(n);
        std::ofstream file(name);
        file << std::string(8 << 20, 'x') << std::flush;
        if (!file) throw std::runtime_error("no file");
    }
}
