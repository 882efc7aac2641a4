// 15. One input channel, seven multiplications in place of ten.
//
// Changed against 13_column_pairs.cu: two neighbouring outputs share most of their pixels, and
// Winograd's F(2, 3) makes use of it: for two outputs and three taps g of a row, and the four
// pixels d under them, four products in place of six,
//   Z0 = (d0 - d2) g0,  Z1 = (d1 + d2) (g0 + g1 + g2) / 2,
//   Z2 = (d2 - d1) (g0 - g1 + g2) / 2,  Z3 = (d1 - d3) g2;  y0 = Z0 + Z1 + Z2,  y1 = Z1 - Z2 - Z3,
// and three for two taps (g2 is zero). A row of taps is cut into twos and a last three; each Z is
// summed over them and over the rows, and they are put together once, at the end. So a kernel of
// 3 takes 4 products of 6, one of 5 takes 7 of 10, and one of 7 takes 10 of 14. Nothing is divided
// but by two: whole numbers stay exact. What is made of the pixels stays in registers for all
// filters; what is made of the weights is in shared memory, made once by blocks that stay.
// Columns that are no aligned pairs are loaded and stored one by one.
// (S. Winograd, Arithmetic Complexity of Computations, 1980; for images: A. Lavin and S. Gray,
// Fast Algorithms for Convolutional Neural Networks, 2016.)
//
// Measured: fa19_1 1.03 ms (0.67x); batch 10000, NVIDIA H200.
#ifndef CHANNELS  // by default the first convolution of term 2019fa
#define CHANNELS 1
#define HEIGHT 70
#define WIDTH 70
#define FILTERS 12
#endif
#include "winograd.cuh"
#include "float2.cuh"

#ifndef THREADS
#define THREADS 128
#endif
#ifndef BLOCKS
#define BLOCKS 4
#endif

constexpr int kStrips = divide_up(kOutH, ROWS);
constexpr int kPairs = divide_up(kOutW, 2);  // of columns
constexpr bool kEven = kOutW % 2 == 0;       // then all pairs are whole, and aligned

// The pixels of a row under a pair of columns; what is right of the image is taken as zero.
__device__ __forceinline__ void load_row(float (&pixels)[kWindow], const float *from, bool together,
                                         bool whole) {
#pragma unroll
    for (int q = 0; q < kWindow; q += 2) {
        if (kEven) {
            const float2 pair = load_pair(from + q, together);
            pixels[q] = pair.x;
            pixels[q + 1] = pair.y;
        } else {
            pixels[q] = __ldg(from + q);
            pixels[q + 1] = q + 2 < kWindow || whole ? __ldg(from + q + 1) : 0;
        }
    }
}

// All filters' outputs of a thread, from the first one's on. `skipped` rows are not its own, and
// `whole` says whether the right one of a pair is.
template <bool together>
__device__ __forceinline__ void convolve_all(float *column,
                                             const float (&made)[kWindowRows][kRowProducts],
                                             const float (*factors)[kFactors], const float *bias,
                                             int skipped, bool whole) {
#pragma unroll 1
    for (int filter = 0; filter < FILTERS; filter++, column += kOutPlane) {
        float2 outputs[ROWS];
        convolve_pairs(outputs, made, factors[filter]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (kOutH % ROWS != 0 && r < skipped) continue;
            float *to = column + r * kOutW;
            if (kEven) {
                store_pair<false>(to, outputs[r], bias, filter, together);
            } else {
                store(to, outputs[r].x, bias, filter);
                if (whole) store(to + 1, outputs[r].y, bias, filter);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    __shared__ __align__(16) float factors[FILTERS][kFactors];
    load_factors(factors, w, THREADS);
    __syncthreads();
    const bool read_pairs = aligned(x), write_pairs = kEven && aligned(y);
    const unsigned windows = batch * (kStrips * kPairs);
    for (unsigned index = blockIdx.x * THREADS + threadIdx.x; index < windows;
         index += gridDim.x * THREADS) {
        const int j = index % kPairs * 2, strip = index / kPairs % kStrips;
        const unsigned b = index / kPairs / kStrips;
        // The last strip is moved up to end with the image; the rows above `first` are not its own.
        const int first = strip * ROWS, i0 = min(first, kOutH - ROWS);
        const bool whole = kEven || j + 1 < kOutW;
        const float *window = x + b * kImage + i0 * WIDTH + j;
        float made[kWindowRows][kRowProducts];
#pragma unroll
        for (int r = 0; r < kWindowRows; r++) {
            float pixels[kWindow];
            load_row(pixels, window + r * WIDTH, read_pairs, whole);
            transform(made[r], pixels);
        }
        float *column = y + b * kOutImage + i0 * kOutW + j;
        if (write_pairs) {
            convolve_all<true>(column, made, factors, bias, first - i0, whole);
        } else {
            convolve_all<false>(column, made, factors, bias, first - i0, whole);
        }
    }
}
