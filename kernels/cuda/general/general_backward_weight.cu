// The gradient for w of any convolution: dw from x and dy.
//
// An implicit matrix product as in general.cu: filters x pixels of all images times those pixels x
// (channels, p, q). It is deep and small, so blocks divide the pixels into slices, and `reduce`
// adds up their results in a fixed order and in double precision.
//
// Measured: no, it is not on the ladder.
#include "general.cuh"
#include "weight_sum.cuh"

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

// Sums that are not finite are recomputed.
extern "C" __global__ void reduce(ELEMENT *__restrict__ dw, const TOTAL *__restrict__ parts,
                                  const ELEMENT *__restrict__ x, const ELEMENT *__restrict__ dy,
                                  int batch, int slices) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= kWeights) return;
    double sum = 0;
    for (int slice = 0; slice < slices; slice++) sum += parts[slice * size_t(kWeights) + index];
    TOTAL total = TOTAL(sum);
    if (!isfinite(total)) {
        const unsigned filter = index / kColumns;
        const unsigned channel = filter / kGroupFilters * kGroupChannels + index % kColumns / kTaps;
        total = weight_sum<SUM, HEIGHT, WIDTH, kOutH, kOutW>(
            x + channel * kPlane, CHANNELS * kPlane, dy + filter * kOutPlane, FILTERS * kOutPlane,
            batch, index % kTaps);
    }
    store(dw + index, total);
}
