// The gradient for w of convolutions whose groups have one channel and one filter: dw from x and
// dy.
//
// A block takes a channel, or several of small planes, and some of the images: of each it copies
// rows of x and dy into shared memory, and every thread keeps a sum for each tap in registers. The
// next rows are on their way meanwhile. In the end the threads' sums are added up, always in the
// same order; where several blocks share a channel, `reduce` adds up theirs.
//
// Measured: no, it is not on the ladder.
#include "depthwise.cuh"

constexpr unsigned kWeights = CHANNELS * kTaps;
constexpr int kGroups = divide_up(CHANNELS, PLANES);

using Sums = float[KERNEL_H][KERNEL_W];

// A weight's sum by the definition, in double precision.
__device__ __noinline__ float textbook(const float *x, const float *dy, int batch, int weight) {
    const int channel = weight / kTaps, p = weight % kTaps / KERNEL_W;
    const int q = weight % kTaps % KERNEL_W;
    double sum = 0;
    for (int image = 0; image < batch; image++) {
        const size_t plane = size_t(image) * CHANNELS + channel;
        for (int i = 0; i < int(kOutPlane); i++) {
            const int row = i / kOutW * STRIDE_H - PAD_H + p * DILATE_H;
            const int column = i % kOutW * STRIDE_W - PAD_W + q * DILATE_W;
            if (row < 0 || row >= kInH || column < 0 || column >= kInW) continue;
            sum += double(x[plane * kInPlane + row * kInW + column]) * dy[plane * kOutPlane + i];
        }
    }
    return float(sum);
}

// Write a sum. Where it is not finite, padding may have been multiplied: it is computed again.
__device__ __forceinline__ void put(float *dw, float sum, const float *x, const float *dy,
                                    int batch, int weight) {
    if (!isfinite(sum)) sum = textbook(x, dy, batch, weight);
    if (ACCUMULATE) sum += dw[weight];
    dw[weight] = sum;
}

// Where a block's rows of an image begin in both arrays.
struct Unit {
    Band band;
    unsigned plane;

    __device__ Unit(unsigned number, unsigned channel)
        : band(number % kBands), plane(number / kBands * CHANNELS + channel) {}

    __device__ const float *in(const float *x) const {
        return x + size_t(plane) * kInPlane + band.first * kInW;
    }

    __device__ const float *out(const float *dy) const {
        return dy + size_t(plane) * kOutPlane + band.row * kOutW;
    }
};

// Add to each tap's sum what a thread's outputs give. Rows behind the last one have no part in it,
// not even as zeros: what lies under their windows may be infinite.
__device__ __forceinline__ void add_up(Sums &sums, const Window &window, const float *dy,
                                       const Band &band, const Item &item) {
    float gradients[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = item.plane * kOutH + item.row - band.row + r;
        gradients[r] = kEven || item.row + r < kOutH ? dy[row * kOutW + item.column] : 0;
    }
#pragma unroll
    for (int h = kLeast; h <= kMost; h++) {
        float pixels[kColumns][KERNEL_W];
        window.read(pixels, h);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!kEven && item.row + r >= kOutH) continue;
#pragma unroll
            for (int p = 0; p < KERNEL_H; p++) {
                if (Down::offset(r, p) != h) continue;
#pragma unroll
                for (int q = 0; q < KERNEL_W; q++) sums[p][q] += gradients[r] * pixels[0][q];
            }
        }
    }
}

__device__ __forceinline__ float sum_of_warp(float sum) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    return sum;
}

// Calls f(plane, tap, sum) with the sums of all threads that have the plane.
template <class F>
__device__ __forceinline__ void finish_one_plane(const Sums &sums, F f) {
    constexpr int kWarps = THREADS / 32;
    __shared__ float of_warps[kTaps][kWarps];
#pragma unroll
    for (int tap = 0; tap < kTaps; tap++) {
        const float sum = sum_of_warp(sums[tap / KERNEL_W][tap % KERNEL_W]);
        if (threadIdx.x % 32 == 0) of_warps[tap][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    for (int tap = threadIdx.x; tap < kTaps; tap += THREADS) {
        float sum = 0;
        for (int warp = 0; warp < kWarps; warp++) sum += of_warps[tap][warp];
        f(0, tap, sum);
    }
}

template <class F>
__device__ __forceinline__ void finish_planes(const Sums &sums, int planes, F f) {
    __shared__ float of_threads[KERNEL_W][THREADS];
#pragma unroll
    for (int p = 0; p < KERNEL_H; p++) {
        __syncthreads();
#pragma unroll
        for (int q = 0; q < KERNEL_W; q++) of_threads[q][threadIdx.x] = sums[p][q];
        __syncthreads();
        for (int i = threadIdx.x; i < planes * KERNEL_W; i += THREADS) {
            const int plane = i / KERNEL_W, q = i % KERNEL_W;
            float sum = 0;
#pragma unroll 4
            for (int item = 0; item < kPlaneItems; item++) {
                sum += of_threads[q][plane * kPlaneItems + item];
            }
            f(plane, p * KERNEL_W + q, sum);
        }
    }
}

// Units are bands of an image; each slice has `each` of them. Of one slice the sums are finished,
// of more they become parts[slice][weight].
extern "C" __global__ void __launch_bounds__(THREADS)
    backward_weight(float *dw, float *parts, const float *x, const float *dy, int batch, int slices,
                    int each) {
    __shared__ Tile x_tile;
    __shared__ float4 dy_space[vectors_for(kOutFloats)];
    const unsigned channel = blockIdx.x % kGroups * PLANES, slice = blockIdx.x / kGroups;
    const int held = PLANES == 1 ? 1 : min(PLANES, int(CHANNELS - channel));
    const unsigned begin = slice * each, end = min(begin + each, unsigned(batch) * kBands);

    Sums sums = {};
    Copy<kInFloats> x_copy;
    Copy<kOutFloats> dy_copy;
    const auto load = [&](unsigned number) {
        const Unit unit(number, channel);
        x_copy.load(unit.in(x), unit.band.in_floats(held));
        dy_copy.load(unit.out(dy), unit.band.out_floats(held));
    };
    load(begin);
    for (unsigned number = begin; number < end; number++) {
        __syncthreads();
        x_tile.store(x_copy);
        dy_copy.store(dy_space);
        __syncthreads();
        if (number + 1 < end) load(number + 1);
        const Unit unit(number, channel);
        const int shift = misalignment(unit.in(x));
        const float *dy_tile = placed(dy_space, unit.out(dy));
        for (int i = threadIdx.x; i < held * kPlaneItems; i += THREADS) {
            const Item item(i, unit.band);
            add_up(sums, Window(x_tile, shift, unit.band, item), dy_tile, unit.band, item);
        }
    }

    const auto finish = [=](int plane, int tap, float sum) {
        const unsigned weight = (channel + plane) * kTaps + tap;
        if (slices == 1) {
            put(dw, sum, x, dy, batch, weight);
        } else {
            parts[slice * size_t(kWeights) + weight] = sum;
        }
    };
    if constexpr (PLANES == 1) {
        finish_one_plane(sums, finish);
    } else {
        finish_planes(sums, held, finish);
    }
}

extern "C" __global__ void reduce(float *dw, const float *parts, const float *x, const float *dy,
                                  int batch, int slices) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= kWeights) return;
    double sum = 0;
#pragma unroll 8
    for (int slice = 0; slice < slices; slice++) sum += parts[slice * size_t(kWeights) + index];
    put(dw, float(sum), x, dy, batch, index);
}
