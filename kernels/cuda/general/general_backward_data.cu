// The gradient for x of any convolution: dx from w and dy.
//
// An implicit matrix product as in general.cu: channels x (filters, p, q) times (filters, p, q) x
// pixels of x. Output (i, j) reads pixel (h, s) through tap (p, q) where i * stride = h + pad - p *
// dilate, and likewise for j; without such an output, dx is 0. Rows of x at a distance of the
// stride use the same taps p, columns the same taps q: they form a phase. A block has pixels of one
// phase, and its product has that phase's taps only.
//
// Measured: no, it is not on the ladder.
#include "general.cuh"

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// A phase of an axis of x: positions first, first + STRIDE, ..., and the taps that reach outputs
// from them: tap, tap + kTapStep, ... Every phase has as many positions as the largest one, so its
// last may be beyond x.
template <int SIZE, int KERNEL, int STRIDE, int PAD, int DILATE>
struct Phase {
    static constexpr int kPhases = SIZE < STRIDE ? SIZE : STRIDE;
    static constexpr int kPlaces = divide_up(SIZE, STRIDE);
    static constexpr int kTapStep = STRIDE / gcd(STRIDE, DILATE);
    static constexpr int kOutStep = DILATE / gcd(STRIDE, DILATE);
    static constexpr int kMostTaps = divide_up(KERNEL, kTapStep);  // or one fewer, or none

    int first, tap = 0;

    __device__ __forceinline__ explicit Phase(int first) : first(first) {
        while (tap < KERNEL && (first + PAD - tap * DILATE) % STRIDE != 0) tap++;
    }
    __device__ __forceinline__ int taps() const { return divide_up(KERNEL - tap, kTapStep); }
    __device__ __forceinline__ unsigned position(unsigned place) const {
        return first + place * STRIDE;
    }
    // The output that reads a position through tap number t.
    __device__ __forceinline__ int output(int place, int t) const {
        return (first + PAD - tap * DILATE) / STRIDE + place - t * kOutStep;
    }
};

using Rows = Phase<HEIGHT, KERNEL_H, STRIDE_H, PAD_H, DILATE_H>;
using Columns = Phase<WIDTH, KERNEL_W, STRIDE_W, PAD_W, DILATE_W>;
constexpr unsigned kPlaces = Rows::kPlaces * Columns::kPlaces;

// i / ROW * DOWN + i % ROW * ACROSS, without a division if rows are contiguous.
template <unsigned ROW, unsigned DOWN, unsigned ACROSS>
__device__ __forceinline__ unsigned spread(unsigned i) {
    return i * ACROSS + i / ROW * (DOWN - ROW * ACROSS);
}

// A constant as a type.
template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls f with the number of a phase's taps as a constant, if it has any.
template <class Axis, class F>
__device__ __forceinline__ void with_taps(const Axis &phase, F f) {
    constexpr int kMost = Axis::kMostTaps;
    if (phase.taps() == kMost) {
        f(Count<kMost>());
    } else if constexpr (kMost > 1) {
        if (phase.taps() == kMost - 1) f(Count<kMost - 1>());
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    backward_data(ELEMENT *__restrict__ dx, const ELEMENT *__restrict__ w,
                  const ELEMENT *__restrict__ dy, int batch) {
    constexpr int kDown = divide_up(kGroupChannels, kTileRows);
    const int channel0 = blockIdx.x % kDown * kTileRows, group = blockIdx.x / kDown % GROUPS;
    const unsigned rest = blockIdx.x / kDown / GROUPS;
    const Rows rows(rest % Rows::kPhases);
    const Columns columns(rest / Rows::kPhases % Columns::kPhases);
    const unsigned place0 = rest / Rows::kPhases / Columns::kPhases * kTileColumns;
    const unsigned places = batch * kPlaces;

    Sums sums = {};
    with_taps(rows, [&](auto taps_h) {
        with_taps(columns, [&](auto taps_w) {
            constexpr int kAcross = decltype(taps_w)::value;
            constexpr int kPhaseTaps = decltype(taps_h)::value * kAcross;
            constexpr unsigned kTapDown = unsigned(Rows::kTapStep) * KERNEL_W;
            constexpr unsigned kTapAcross = Columns::kTapStep;
            const int first_tap = rows.tap * KERNEL_W + columns.tap;
            const auto weight = [=](int r, int k) {
                if (channel0 + r >= kGroupChannels) return SUM(0);
                const int filter = group * kGroupFilters + k / kPhaseTaps;
                const int tap = first_tap + spread<kAcross, kTapDown, kTapAcross>(k % kPhaseTaps);
                return load(w + (filter * kGroupChannels + channel0 + r) * kTaps + tap);
            };
            const auto gradient = [=](int k, int column) {
                const unsigned n = place0 + column;
                if (n >= places) return SUM(0);
                const int filter = group * kGroupFilters + k / kPhaseTaps, t = k % kPhaseTaps;
                const int i = rows.output(n % kPlaces / Columns::kPlaces, t / kAcross);
                const int j = columns.output(n % kPlaces % Columns::kPlaces, t % kAcross);
                if (unsigned(i) >= kOutH || unsigned(j) >= kOutW) return SUM(0);
                return load(dy + (n / kPlaces * FILTERS + filter) * kOutPlane + i * kOutW + j);
            };
            multiply<false>(sums, 0, kGroupFilters * kPhaseTaps, weight, gradient);
        });
    });
    constexpr unsigned kPlaceDown = unsigned(STRIDE_H) * WIDTH;
    const int first_pixel = rows.first * WIDTH + columns.first;
    for_each(sums, [=](TOTAL sum, int r, int column) {
        const unsigned n = place0 + column;
        const unsigned h = rows.position(n % kPlaces / Columns::kPlaces);
        const unsigned s = columns.position(n % kPlaces % Columns::kPlaces);
        if (channel0 + r >= kGroupChannels || n >= places || h >= HEIGHT || s >= WIDTH) return;
        const int channel = group * kGroupChannels + channel0 + r;
        const unsigned at = spread<Columns::kPlaces, kPlaceDown, STRIDE_W>(n % kPlaces);
        store(dx + (n / kPlaces * CHANNELS + channel) * kPlane + first_pixel + at, sum);
    });
}
