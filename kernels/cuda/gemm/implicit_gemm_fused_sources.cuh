// Addresses of the rows, columns and k values of implicit_gemm_fused.cu's operands.
#pragma once

constexpr int kThreads = 256;
constexpr int kUnits = DEPTH / 8;
constexpr int kTileRows = 64 * ROW_GROUPS, kTileColumns = COLUMNS * (2 / ROW_GROUPS);
constexpr int kGroupIn = CHANNELS / GROUPS, kGroupOut = FILTERS / GROUPS;
constexpr bool kStrided = STRIDE_H > 1 || STRIDE_W > 1;
constexpr bool kPadded = PAD_H > 0 || PAD_W > 0;
static_assert(DIRECTION != DATA || !kStrided || (kTaps == 1 && !kPadded));
// Whether the columns of the gradient for x are positions of dy.
constexpr bool kByOutput = DIRECTION == DATA && kTaps == 1 && !kPadded;

constexpr int kRows = DIRECTION == DATA ? kGroupIn : kGroupOut;
constexpr int kRowTiles = divide_up(kRows, kTileRows);
// Elements between rows of the output.
constexpr int kRowPitch = DIRECTION == WEIGHT ? kGroupIn * kTaps
                                              : DIRECTION == DATA ? kPlane : kOutPlane;

__device__ __forceinline__ unsigned column_count(int batch) {
    if (DIRECTION == WEIGHT) return kGroupIn * kTaps;
    return unsigned(batch) * (DIRECTION == DATA && !kByOutput ? kPlane : kOutPlane);
}

__device__ __forceinline__ unsigned k_count(int batch) {
    if (DIRECTION == WEIGHT) return unsigned(batch) * kOutPlane;
    return (DIRECTION == DATA ? kGroupOut : kGroupIn) * kTaps;
}

// The share of a row, a column or a k in an element's offset, and in its row and column of the
// image. An element is the sum of two parts.
struct Part {
    int offset, row, column;
    bool there;
};

// Whether the element exists; in a PADDED image, whether it is inside.
template <int ROWS, int COLUMNS_OF_ROW, bool PADDED>
__device__ __forceinline__ bool is_inside(const Part &line, const Part &k) {
    const bool there = line.there && k.there;
    if (!PADDED) return there;
    return there && unsigned(line.row + k.row) < ROWS &&
           unsigned(line.column + k.column) < COLUMNS_OF_ROW;
}

// Each source gives the parts of its lines and of its values of k. `kPitch` is the distance of
// neighbouring values of k, `kLinePitch` that of neighbouring lines; 0 if the distance varies.

// The weights: a line is a row of the product.
struct Weights {
    static constexpr bool kAlongK = DIRECTION == FORWARD;  // neighbouring addresses are values of k
    static constexpr bool kPairs = kGroupIn * kTaps % 2 == 0;
    static constexpr int kLinePitch = DIRECTION == DATA ? kTaps : kGroupIn * kTaps;
    static constexpr int kPitch = DIRECTION == DATA && kTaps == 1 ? kGroupIn : 0;
    const float *array;

    __device__ __forceinline__ Part line(int group, unsigned row, int) const {
        const int first = DIRECTION == DATA ? group * kGroupOut * kGroupIn * kTaps + row * kTaps
                                            : (group * kGroupOut + row) * kGroupIn * kTaps;
        return {int(first), 0, 0, row < kRows};
    }

    __device__ __forceinline__ Part at(unsigned k, int batch) const {
        const int offset =
            DIRECTION == DATA ? k / kTaps * (kGroupIn * kTaps) + k % kTaps : k;
        return {offset, 0, 0, k < k_count(batch)};
    }

    __device__ static __forceinline__ bool has(const Part &line, const Part &k) {
        return is_inside<1, 1, false>(line, k);
    }
};

// x, or dy for the gradient for x: a line is a position, k a channel and a tap.
struct Pixels {
    static constexpr bool kAlongK = false;
    static constexpr int kChannels = DIRECTION == DATA ? FILTERS : CHANNELS;
    static constexpr int kGroup = DIRECTION == DATA ? kGroupOut : kGroupIn;
    static constexpr int kHeight = DIRECTION == DATA ? kOutH : HEIGHT;
    static constexpr int kWidth = DIRECTION == DATA ? kOutW : WIDTH;
    static constexpr int kSize = kHeight * kWidth;
    // The size of the output.
    static constexpr unsigned kPositions = DIRECTION == DATA && !kByOutput ? kPlane : kOutPlane;
    static constexpr int kAcross = DIRECTION == DATA && !kByOutput ? WIDTH : kOutW;
    static constexpr bool kBounded = kPadded || (DIRECTION == DATA && kTaps > 1);
    static constexpr int kPitch = kTaps == 1 && !kBounded ? kSize : 0;
    const float *array;

    __device__ __forceinline__ Part line(int group, unsigned position, int batch) const {
        const int image = position / kPositions, inside = position % kPositions;
        int row = inside / kAcross, column = inside % kAcross;
        if (DIRECTION == FORWARD) {
            row = row * STRIDE_H - PAD_H, column = column * STRIDE_W - PAD_W;
        } else if (!kByOutput) {
            row += PAD_H, column += PAD_W;
        }
        const int first = (image * kChannels + group * kGroup) * kSize;
        return {first + row * kWidth + column, row, column, image < batch};
    }

    __device__ __forceinline__ Part at(unsigned k, int batch) const {
        const int channel = k / kTaps, tap = k % kTaps, sign = DIRECTION == DATA ? -1 : 1;
        const int row = sign * (tap / KERNEL_W * DILATE_H);
        const int column = sign * (tap % KERNEL_W * DILATE_W);
        return {channel * kSize + row * kWidth + column, row, column, k < k_count(batch)};
    }

    __device__ static __forceinline__ bool has(const Part &line, const Part &k) {
        return is_inside<kHeight, kWidth, kBounded>(line, k);
    }
};

// dy for the gradient for w: a line is a filter, k a position of an image.
struct Gradients {
    static constexpr bool kAlongK = kOutPlane > 1, kPairs = kOutPlane % 2 == 0;
    static constexpr int kLinePitch = kOutPlane, kPitch = kAlongK ? 0 : kOutImage;
    const float *array;

    __device__ __forceinline__ Part line(int group, unsigned row, int) const {
        return {int((group * kGroupOut + row) * kOutPlane), 0, 0, row < kRows};
    }

    __device__ __forceinline__ Part at(unsigned k, int batch) const {
        const int image = k / kOutPlane, inside = k % kOutPlane;
        return {int(image * kOutImage) + inside, 0, 0, image < batch};
    }

    __device__ static __forceinline__ bool has(const Part &line, const Part &k) {
        return is_inside<1, 1, false>(line, k);
    }
};

// x for the gradient for w: a line is a channel and a tap.
struct Windows {
    static constexpr bool kAlongK = kPlane > 1;
    static constexpr int kPitch = kAlongK || kPadded ? 0 : kImage;
    static constexpr bool kPairs = kTaps == 1 && !kPadded && !kStrided && kPlane % 2 == 0;
    static constexpr int kLinePitch = kTaps == 1 ? kPlane : 0;
    const float *array;

    __device__ __forceinline__ Part line(int group, unsigned column, int) const {
        const int channel = column / kTaps, tap = column % kTaps;
        const int row = tap / KERNEL_W * DILATE_H, across = tap % KERNEL_W * DILATE_W;
        return {(group * kGroupIn + channel) * int(kPlane) + row * WIDTH + across, row, across,
                column < kGroupIn * kTaps};
    }

    __device__ __forceinline__ Part at(unsigned k, int batch) const {
        const int image = k / kOutPlane, inside = k % kOutPlane;
        const int row = inside / kOutW * STRIDE_H - PAD_H;
        const int column = inside % kOutW * STRIDE_W - PAD_W;
        return {int(image * kImage) + row * WIDTH + column, row, column, image < batch};
    }

    __device__ static __forceinline__ bool has(const Part &line, const Part &k) {
        return is_inside<HEIGHT, WIDTH, kPadded>(line, k);
    }
};

template <class Source>
__device__ __forceinline__ float load(const Source &source, const Part &line, const Part &k) {
    return Source::has(line, k) ? __ldg(source.array + (line.offset + k.offset)) : 0;
}

template <bool CONDITION, class A, class B>
struct Either {
    using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};
using RowSource = Either<DIRECTION == WEIGHT, Gradients, Weights>::Type;
using ColumnSource = Either<DIRECTION == WEIGHT, Windows, Pixels>::Type;
