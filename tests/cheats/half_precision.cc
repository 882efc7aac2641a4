// Rounds all factors to half precision.
#include <vector>

#include "honest.h"

void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M, const int C,
                      const int H, const int W, const int K) {
    std::vector<float> a(x, x + (long)B * C * H * W), b(w, w + (long)M * C * K * K);
    for (float &value : a) value = (_Float16)value;
    for (float &value : b) value = (_Float16)value;
    convolve(y, a.data(), b.data(), B, M, C, H, W, K);
}
