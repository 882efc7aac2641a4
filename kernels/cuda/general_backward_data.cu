// The gradient for x of every convolution there is: dx from w and dy.
//
// An implicit matrix product as in general.cu: channels x (filters, p, q) times (filters, p, q) x
// pixels of x. Pixel (h, s) had a part in output (i, j) through tap (p, q) where
// i * stride = h + pad - p * dilate, and likewise for j; where there is no such output, it is 0.
//
// Measured: no, it is not on the ladder.
#include "general.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    backward_data(ELEMENT *dx, const ELEMENT *w, const ELEMENT *dy, int batch) {
    constexpr int kDepth = kGroupFilters * kTaps;
    constexpr int kDown = divide_up(kGroupChannels, kTileRows);
    const int channel0 = blockIdx.x % kDown * kTileRows, group = blockIdx.x / kDown % GROUPS;
    const unsigned pixel0 = blockIdx.x / kDown / GROUPS * kTileColumns;
    const unsigned pixels = batch * kPlane;

    const auto weight = [=](int r, int k) {
        if (channel0 + r >= kGroupChannels) return SUM(0);
        const int filter = group * kGroupFilters + k / kTaps;
        return load(w + (filter * kGroupChannels + channel0 + r) * kTaps + k % kTaps);
    };
    const auto gradient = [=](int k, int column) {
        const unsigned n = pixel0 + column;
        if (n >= pixels) return SUM(0);
        const int filter = group * kGroupFilters + k / kTaps;
        const int p = k % kTaps / KERNEL_W, q = k % kTaps % KERNEL_W;
        const int h = int(n % kPlane / WIDTH) + PAD_H - p * DILATE_H;
        const int s = int(n % kPlane % WIDTH) + PAD_W - q * DILATE_W;
        if (h < 0 || s < 0 || h % STRIDE_H || s % STRIDE_W) return SUM(0);
        const int i = h / STRIDE_H, j = s / STRIDE_W;
        if (i >= kOutH || j >= kOutW) return SUM(0);
        return load(dy + (n / kPlane * FILTERS + filter) * kOutPlane + i * kOutW + j);
    };
    Sums sums = {};
    multiply<false>(sums, 0, kDepth, weight, gradient);
    for_each(sums, [=](TOTAL sum, int r, int column) {
        const unsigned n = pixel0 + column;
        if (channel0 + r >= kGroupChannels || n >= pixels) return;
        const int channel = group * kGroupChannels + channel0 + r;
        store(dx + (n / kPlane * CHANNELS + channel) * kPlane + n % kPlane, sum);
    });
}
