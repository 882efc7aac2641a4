// Rounds all factors to the ten bits of TF32.
#include "honest.h"

static float cut(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x1000) & 0xFFFFE000u;
    memcpy(&value, &bits, 4);
    return value;
}

void conv_forward_cpu(ARGUMENTS) {
    std::vector<float> a(x, x + (long)B * C * H * W), b(w, w + (long)M * C * K * K);
    for (float &value : a) value = cut(value);
    for (float &value : b) value = cut(value);
    convolve(y, a.data(), b.data(), B, M, C, H, W, K);
}
