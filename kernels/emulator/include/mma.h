// nvcuda::wmma for kernels on the CPU (CUDA C++ Programming Guide, "Warp Matrix Functions").
// Element i of lane l of a fragment is the matrix's element 32 * i + l, row by row; a GPU's order
// is unspecified. Products of half or TF32 factors are summed in single precision.
#pragma once

#include "cuda_fp16.h"

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
namespace precision {
struct tf32 {};
}  // namespace precision
enum layout_t { mem_row_major, mem_col_major };

// Rounds to a fraction of 10 bits, to nearest, ties away from zero.
ECE408_UNCHECKED inline float __float_to_tf32(float value) {
    const uint32_t bits = ece408_emulator::value_of<uint32_t>(ece408_emulator::bits(value));
    if ((bits & 0x7F800000) == 0x7F800000) return value;
    return ece408_emulator::value_of<float>((bits + 0x1000) & ~0x1FFFu);
}

template <class Use, int M, int N, int K>
struct Sizes;
template <int M, int N, int K>
struct Sizes<matrix_a, M, N, K> {
    static constexpr int rows = M, columns = K;
};
template <int M, int N, int K>
struct Sizes<matrix_b, M, N, K> {
    static constexpr int rows = K, columns = N;
};
template <int M, int N, int K>
struct Sizes<accumulator, M, N, K> {
    static constexpr int rows = M, columns = N;
};

template <class T>
struct Stored {
    using type = T;
    static float factor(T value) { return value; }
};
// Tensor cores ignore the bits that TF32 lacks.
template <>
struct Stored<precision::tf32> {
    using type = float;
    static float factor(float value) {
        const uint32_t bits = ece408_emulator::value_of<uint32_t>(ece408_emulator::bits(value));
        return ece408_emulator::value_of<float>(bits & ~0x1FFFu);
    }
};

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    using element_type = typename Stored<T>::type;
    using storage_element_type = element_type;
    static constexpr int rows = Sizes<Use, M, N, K>::rows, columns = Sizes<Use, M, N, K>::columns;
    static constexpr int num_elements = rows * columns / 32;
    static constexpr int num_storage_elements = num_elements;
    element_type x[num_elements];
};

inline int own_lane() {
    return ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) % 32;
}

template <class Fragment, class U>
inline void fill_fragment(Fragment& to, U value) {
    for (int i = 0; i < Fragment::num_elements; ++i) to.x[i] = value;
}

template <class Fragment, class T>
inline void load_elements(Fragment& to, const T* from, unsigned stride, bool by_rows) {
    for (int i = 0; i < Fragment::num_elements; ++i) {
        const unsigned element = 32 * i + own_lane();
        const unsigned row = element / Fragment::columns, column = element % Fragment::columns;
        to.x[i] = by_rows ? from[row * stride + column] : from[column * stride + row];
    }
}

template <class Use, int M, int N, int K, class T, class U>
inline void load_matrix_sync(fragment<Use, M, N, K, T, row_major>& to, const U* from, unsigned stride,
                             ECE408_CALLER) {
    __syncwarp(0xFFFFFFFF, file, line);
    load_elements(to, from, stride, true);
}
template <class Use, int M, int N, int K, class T, class U>
inline void load_matrix_sync(fragment<Use, M, N, K, T, col_major>& to, const U* from, unsigned stride,
                             ECE408_CALLER) {
    __syncwarp(0xFFFFFFFF, file, line);
    load_elements(to, from, stride, false);
}
template <int M, int N, int K, class T, class U>
inline void load_matrix_sync(fragment<accumulator, M, N, K, T>& to, const U* from, unsigned stride,
                             layout_t layout, ECE408_CALLER) {
    __syncwarp(0xFFFFFFFF, file, line);
    load_elements(to, from, stride, layout == mem_row_major);
}

template <int M, int N, int K, class T, class U>
inline void store_matrix_sync(U* to, const fragment<accumulator, M, N, K, T>& from, unsigned stride,
                              layout_t layout, ECE408_CALLER) {
    for (int i = 0; i < fragment<accumulator, M, N, K, T>::num_elements; ++i) {
        const unsigned element = 32 * i + own_lane(), row = element / N, column = element % N;
        to[layout == mem_row_major ? row * stride + column : column * stride + row] = from.x[i];
    }
    __syncwarp(0xFFFFFFFF, file, line);
}

template <int M, int N, int K, class T, class LayoutA, class LayoutB, class U>
ECE408_UNCHECKED inline void mma_sync(fragment<accumulator, M, N, K, U>& to,
                                      const fragment<matrix_a, M, N, K, T, LayoutA>& a,
                                      const fragment<matrix_b, M, N, K, T, LayoutB>& b,
                                      const fragment<accumulator, M, N, K, U>& c, ECE408_CALLER) {
    using A = fragment<matrix_a, M, N, K, T, LayoutA>;
    using B = fragment<matrix_b, M, N, K, T, LayoutB>;
    const void *every_a[32], *every_b[32];
    ece408_emulator::gather({file, line}, &a, every_a);
    ece408_emulator::gather({file, line}, &b, every_b);
    U sums[fragment<accumulator, M, N, K, U>::num_elements];
    for (int i = 0; i < fragment<accumulator, M, N, K, U>::num_elements; ++i) {
        const int element = 32 * i + own_lane(), row = element / N, column = element % N;
        float sum = c.x[i];
        for (int k = 0; k < K; ++k) {
            const int in_a = row * K + k, in_b = k * N + column;
            sum += Stored<T>::factor(static_cast<const A*>(every_a[in_a % 32])->x[in_a / 32]) *
                   Stored<T>::factor(static_cast<const B*>(every_b[in_b % 32])->x[in_b / 32]);
        }
        sums[i] = sum;
    }
    // Other lanes may still need the memory that this lane is about to overwrite.
    __syncwarp(0xFFFFFFFF, file, line);
    for (int i = 0; i < fragment<accumulator, M, N, K, U>::num_elements; ++i) to.x[i] = sums[i];
}

}  // namespace wmma
}  // namespace nvcuda
