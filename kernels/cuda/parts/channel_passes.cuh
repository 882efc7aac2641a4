// Passes over channels of arrays (images, channels, pixels), and sums over them that are the same
// in every run. x and its gradient may be parts of more channels, and so may the others.
//
// A block has one split of kLanes adjacent channels: a range of each channel's vectors, which its
// kRanks threads read in turn. Sums are in double: where that runs at half the rate of float,
// reading the arrays takes longer.
#pragma once

#include <stdint.h>

#ifndef CHANNELS_LAST
#define CHANNELS_LAST 0  // arrays have one pixel
#define APART 0  // images of x and dx begin x_image elements apart, others y_image, unless 0
#endif
#define SIZES int images, int channels, int pixels, int splits, int x_image, int y_image
#define GIVEN images, channels, pixels, splits, x_image, y_image

// Four blocks at a time: registers for several loads.
#define PASS __launch_bounds__(256, 4)
constexpr unsigned kThreads = 256;
// Neighbouring threads read channels that are adjacent in memory, a sector of it.
constexpr unsigned kLanes = CHANNELS_LAST ? 8 : 1, kRanks = kThreads / kLanes;

template <int V>
struct alignas(sizeof(float) * V) Vector {
    float of[V];
};

template <int V>
__device__ Vector<V> load(const float *from) {
    if constexpr (V == 1) return {{__ldg(from)}};
    else {
        const float4 v = __ldg(reinterpret_cast<const float4 *>(from));
        return {{v.x, v.y, v.z, v.w}};
    }
}

template <int V>
__device__ void store(float *to, const Vector<V> &v) {
    if constexpr (V == 1) *to = v.of[0];
    else *reinterpret_cast<float4 *>(to) = make_float4(v.of[0], v.of[1], v.of[2], v.of[3]);
}

// The normalisation of a channel, which both passes of a network round alike.
struct Normal {
    float mean, factor, addend;

    __device__ float of(float x) const { return fmaf(x - mean, factor, addend); }
};

// Indices of floats in x and dx, and in the other arrays.
struct Place {
    unsigned x, y;

    __device__ void operator+=(const Place &other) {
        x += other.x;
        y = APART ? y + other.y : x;
    }
};

// What a thread reads of the arrays: a part of the split `split` of a channel.
struct Pass {
    unsigned images, channels, pixels, splits, x_image, y_image, channel, split;

    __device__ Pass(SIZES, unsigned group, unsigned split)
        : images(images), channels(channels), pixels(pixels), splits(splits),
          x_image(APART && x_image ? x_image : channels * pixels),
          y_image(APART && y_image ? y_image : channels * pixels),
          channel(group * kLanes + threadIdx.x % kLanes), split(split) {}

    __device__ bool is_empty() const { return channel >= channels; }

    __device__ Place place(unsigned image, unsigned floats) const {
        return {image * x_image + floats, image * y_image + floats};
    }

    // Whether pixels can be read as vectors of four floats.
    template <class... Arrays>
    __device__ bool has_vectors(Arrays... arrays) const {
        const unsigned sizes = pixels | x_image | y_image;
        return !CHANNELS_LAST && (((sizes * sizeof(float)) | ... | size_t(arrays)) % 16) == 0;
    }

    // Calls `use(at, fetch(at))` for every V-th place, beginning with the thread's own. TOGETHER
    // fetches, or twice as many of single floats, are on their way at the same time.
    template <int V, int TOGETHER, class Fetch, class Use>
    __device__ void each(const Fetch &fetch, const Use &use) const {
        constexpr unsigned kUnroll = V == 1 ? 2 * TOGETHER : TOGETHER;
        const unsigned per_image = pixels / V, vectors = images * per_image;
        const unsigned length = (vectors + splits - 1) / splits, rank = threadIdx.x / kLanes;
        const unsigned first = split * length + rank, end = min((split + 1) * length, vectors);
        if (is_empty() || first >= end) return;
        // Additions in place of a division for each vector.
        const unsigned on = kRanks % per_image;
        const Place step = place(kRanks / per_image, on * V), wrap = place(1, -pixels);
        Place at = place(first / per_image, channel * pixels + first % per_image * V);
        unsigned pixel = first % per_image;
        for (unsigned left = (end - first + kRanks - 1) / kRanks; left > 0;) {
            Place places[kUnroll];
            decltype(fetch(at)) fetched[kUnroll];
#pragma unroll
            for (unsigned k = 0; k < kUnroll; k++) {
                // After the last one, the first one of these again.
                places[k] = k < left ? at : places[0];
                fetched[k] = fetch(places[k]);
                at += step, pixel += on;
                if (pixel >= per_image) pixel -= per_image, at += wrap;
            }
#pragma unroll
            for (unsigned k = 0; k < kUnroll; k++) {
                if (k < left) use(places[k], fetched[k]);
            }
            left -= min(left, kUnroll);
        }
    }
};

// Two sums over a channel.
struct Sums {
    double first = 0, second = 0;

    __device__ void add(double a, double b) { first += a, second += b; }
};

// Adds the sums of a channel's threads, in a fixed order; the first kLanes threads return them.
// Call it once in a kernel.
__device__ Sums add_up(Sums sums) {
    constexpr unsigned kWarps = kThreads / 32;
    __shared__ double2 of_warps[kWarps][kLanes];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned step = kLanes; step < 32; step *= 2) {
        sums.first += __shfl_xor_sync(0xffffffffu, sums.first, step);
        sums.second += __shfl_xor_sync(0xffffffffu, sums.second, step);
    }
    if (lane < kLanes) of_warps[warp][lane] = make_double2(sums.first, sums.second);
    __syncthreads();
    Sums total;
    if (threadIdx.x < kLanes) {
        for (unsigned k = 0; k < kWarps; k++) total.add(of_warps[k][lane].x, of_warps[k][lane].y);
    }
    return total;
}

// parts[split][channel] are the sums of a split.
__device__ void put_sums(double2 *parts, const Pass &pass, const Sums &sums) {
    const Sums total = add_up(sums);
    if (threadIdx.x < kLanes && !pass.is_empty()) {
        parts[size_t(pass.split) * pass.channels + pass.channel] =
            make_double2(total.first, total.second);
    }
}

// The thread's share of the splits' sums.
__device__ Sums sums_of(const double2 *parts, const Pass &pass) {
    Sums sums;
    for (unsigned s = threadIdx.x / kLanes; s < pass.splits && !pass.is_empty(); s += kRanks) {
        const double2 part = parts[size_t(s) * pass.channels + pass.channel];
        sums.add(part.x, part.y);
    }
    return sums;
}
