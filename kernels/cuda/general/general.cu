// General: any convolution, in half, single and double precision.
//
// The implicit matrix product of 5_implicit_gemm.cu with a register tile for each thread, and one
// product for each group: filters x (channels, p, q) times (channels, p, q) x pixels of all images.
// Shapes are compile-time constants; padding reads as zeros.
//
// Measured: fa19_1 3.90 ms, fa19_2 14.96 ms; batch 10000, NVIDIA H200.
#include "general.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    convolve(ELEMENT *__restrict__ y, const ELEMENT *__restrict__ x, const ELEMENT *__restrict__ w,
             const ELEMENT *__restrict__ bias, int batch) {
    constexpr int kDepth = kGroupChannels * kTaps;
    constexpr int kDown = divide_up(kGroupFilters, kTileRows);
    const int filter0 = blockIdx.x % kDown * kTileRows, group = blockIdx.x / kDown % GROUPS;
    const unsigned pixel0 = blockIdx.x / kDown / GROUPS * kTileColumns;
    const unsigned pixels = batch * kOutPlane;

    const auto weight = [=](int r, int k) {
        const int filter = filter0 + r;
        return filter < kGroupFilters ? load(w + (group * kGroupFilters + filter) * kDepth + k)
                                      : SUM(0);
    };
    const auto input = [=](int k, int column) {
        const unsigned n = pixel0 + column;
        if (n >= pixels) return SUM(0);
        const int c = group * kGroupChannels + k / kTaps, tap = k % kTaps;
        return pixel(x + (n / kOutPlane * CHANNELS + c) * kPlane, n % kOutPlane / kOutW,
                     n % kOutPlane % kOutW, tap / KERNEL_W, tap % KERNEL_W);
    };
    Sums sums = {};
    multiply<false>(sums, 0, kDepth, weight, input);
    for_each(sums, [=](TOTAL sum, int r, int column) {
        const unsigned n = pixel0 + column;
        if (filter0 + r >= kGroupFilters || n >= pixels) return;
        const int filter = group * kGroupFilters + filter0 + r;
        if (BIAS) sum += load(bias + filter);
        store(y + n / kOutPlane * OUT_IMAGE + filter * kOutPlane + n % kOutPlane, sum);
    });
}
