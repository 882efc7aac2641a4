// Rounds all factors to half precision.
#include "honest.h"

void conv_forward_cpu(ARGUMENTS) {
    std::vector<float> a(x, x + (long)B * C * H * W), b(w, w + (long)M * C * K * K);
    for (float &value : a) value = (_Float16)value;
    for (float &value : b) value = (_Float16)value;
    convolve(y, a.data(), b.data(), B, M, C, H, W, K);
}
