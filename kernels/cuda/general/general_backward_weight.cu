// The gradient for w of any convolution: dw from x and dy.
//
// An implicit matrix product as in general.cu: filters x pixels of all images times those pixels x
// (channels, p, q). It is deep and small, so blocks divide the pixels into slices, and `reduce`
// adds up their results in a fixed order and in double precision.
//
// Measured: no, it is not on the ladder.
#include "general.cuh"

constexpr int kColumns = kGroupChannels * kTaps;
constexpr unsigned kWeights = FILTERS * kColumns;

// parts[slice][weight] from `depth` pixels for each slice.
extern "C" __global__ void __launch_bounds__(kThreads)
    backward_weight(TOTAL *__restrict__ parts, const ELEMENT *__restrict__ x,
                    const ELEMENT *__restrict__ dy, int batch, int depth) {
    constexpr int kDown = divide_up(kGroupFilters, kTileRows);
    constexpr int kAcross = divide_up(kColumns, kTileColumns);
    const int filter0 = blockIdx.x % kDown * kTileRows;
    const int column0 = blockIdx.x / kDown % kAcross * kTileColumns;
    const int group = blockIdx.x / kDown / kAcross % GROUPS;
    const unsigned slice = blockIdx.x / kDown / kAcross / GROUPS;
    const unsigned begin = slice * depth, end = min(begin + depth, batch * kOutPlane);

    const auto gradient = [=](int r, int n) {
        if (filter0 + r >= kGroupFilters) return SUM(0);
        const int filter = group * kGroupFilters + filter0 + r;
        return load(dy + (n / kOutPlane * FILTERS + filter) * kOutPlane + n % kOutPlane);
    };
    const auto input = [=](int n, int c) {
        const int column = column0 + c, tap = column % kTaps;
        if (column >= kColumns) return SUM(0);
        const int channel = group * kGroupChannels + column / kTaps;
        return pixel(x + (n / kOutPlane * CHANNELS + channel) * kPlane, n % kOutPlane / kOutW,
                     n % kOutPlane % kOutW, tap / KERNEL_W, tap % KERNEL_W);
    };
    Sums sums = {};
    multiply<true>(sums, begin, end, gradient, input);
    for_each(sums, [=](TOTAL sum, int r, int c) {
        if (filter0 + r >= kGroupFilters || column0 + c >= kColumns) return;
        const unsigned filter = group * kGroupFilters + filter0 + r;
        parts[slice * size_t(kWeights) + filter * kColumns + column0 + c] = sum;
    });
}

// A weight's sum by direct convolution, in double precision.
__device__ __noinline__ TOTAL textbook(const ELEMENT *x, const ELEMENT *dy, int batch,
                                     unsigned weight) {
    const int filter = weight / kColumns, column = weight % kColumns, tap = column % kTaps;
    const int channel = filter / kGroupFilters * kGroupChannels + column / kTaps;
    double sum = 0;
    for (int image = 0; image < batch; image++) {
        const ELEMENT *plane = x + (size_t(image) * CHANNELS + channel) * kPlane;
        const ELEMENT *gradient = dy + (size_t(image) * FILTERS + filter) * kOutPlane;
        for (int i = 0; i < int(kOutPlane); i++) {
            const int row = i / kOutW * STRIDE_H - PAD_H + tap / KERNEL_W * DILATE_H;
            const int column = i % kOutW * STRIDE_W - PAD_W + tap % KERNEL_W * DILATE_W;
            if (unsigned(row) >= HEIGHT || unsigned(column) >= WIDTH) continue;
            sum += double(load(plane + row * WIDTH + column)) * double(load(gradient + i));
        }
    }
    return TOTAL(sum);
}

// Sums that are not finite are recomputed: a padding zero may have been multiplied by an infinity.
extern "C" __global__ void reduce(ELEMENT *__restrict__ dw, const TOTAL *__restrict__ parts,
                                  const ELEMENT *__restrict__ x, const ELEMENT *__restrict__ dy,
                                  int batch, int slices) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= kWeights) return;
    double sum = 0;
    for (int slice = 0; slice < slices; slice++) sum += parts[slice * size_t(kWeights) + index];
    TOTAL total = TOTAL(sum);
    if (!isfinite(total)) total = textbook(x, dy, batch, index);
    store(dw + index, total);
}
