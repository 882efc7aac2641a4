// Answers with invalid arrays, and with malformed lines.
#define OWN_PROLOG
#include "honest.cuh"

void GPUInterface::conv_forward_gpu_prolog(const float *, const float *host_x, const float *host_w, float **y,
                                           float **x, float **w, SIZES) {
    const char text[] = "{\"done\": true, \"arrays\": [[\"00\", Infinity], 7, [\"zz\", \"one\"]]}\n[1]\n\xff\n";
    for (int fd = 3; fd < 64; fd++) {
        struct stat state;
        if (fstat(fd, &state) == 0 && S_ISFIFO(state.st_mode))
            if (write(fd, text, sizeof text - 1) < 0) continue;
    }
    honest_prolog(host_x, host_w, y, x, w, B, M, C, H, W, K);
}

void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, SIZES) {
    convolve(y, x, w, B, M, C, H, W, K);
}
