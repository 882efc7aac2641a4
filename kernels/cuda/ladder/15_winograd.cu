// 15. One input channel, seven multiplications in place of ten.
//
// Changed against 13_column_pairs.cu: two neighbouring outputs have most of their pixels in common,
// and Winograd's F(2, 3) makes use of it: two outputs of three taps g of a row, from the four
// pixels d under them, take four products instead of six,
//   Z0 = (d0 - d2) g0,  Z1 = (d1 + d2) (g0 + g1 + g2) / 2,
//   Z2 = (d2 - d1) (g0 - g1 + g2) / 2,  Z3 = (d1 - d3) g2;  y0 = Z0 + Z1 + Z2,  y1 = Z1 - Z2 - Z3,
// and three for two taps (g2 is zero). A row of taps is split into twos and a last three; each Z is
// summed over them and over the rows, and the output transform runs once, at the end. So a kernel
// of 3 takes 4 products instead of 6, one of 5 takes 7 instead of 10, and one of 7 takes 10 instead
// of 14. The only division is by two: whole numbers stay exact. Transformed pixels stay in
// registers for all filters; persistent blocks transform the weights once and keep them in shared
// memory. Columns that are not aligned for float2 are loaded and stored one by one. (S. Winograd,
// Arithmetic Complexity of Computations, 1980; for images: A. Lavin and S. Gray, Fast Algorithms
// for Convolutional Neural Networks, 2016.)
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
constexpr bool kEven = kOutW % 2 == 0;       // then every pair of columns is whole and aligned

// The pixels of a row under two columns; pixels beyond the image's right edge are zero.
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

// The outputs of a thread, of all filters. `skipped` rows belong to the previous strip; `whole`
// says whether the right column exists.
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
    convolve(float *__restrict__ y, const float *__restrict__ x, const float *__restrict__ w,
             const float *__restrict__ bias, int batch) {
    __shared__ __align__(16) float factors[FILTERS][kFactors];
    load_factors(factors, w, THREADS);
    __syncthreads();
    const bool read_pairs = aligned(x), write_pairs = kEven && aligned(y);
    const unsigned windows = batch * (kStrips * kPairs);
    for (unsigned index = blockIdx.x * THREADS + threadIdx.x; index < windows;
         index += gridDim.x * THREADS) {
        const int j = index % kPairs * 2, strip = index / kPairs % kStrips;
        const unsigned b = index / kPairs / kStrips;
        // The last strip moves up to end with the image; its rows above `first` belong to the
        // previous one.
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
