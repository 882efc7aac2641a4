"""Half precision and a warp's matrix functions round as a GPU does."""

import ctypes

import numpy as np

from ece408_op.backends.emulator import findings

HALF = """
#include <cuda_fp16.h>
__global__ void compute(unsigned short *y, const float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const half a = __float2half(x[i]), b = __float2half(x[(i + 1) % n]);
    const half c = __float2half(x[(i + 2) % n]);
    const half2 pair = __hfma2(__halves2half2(a, b), __half2half2(b), __half2half2(c));
    half found[] = {a, a + b, __hmul(a, b), __hdiv(a, b), __hfma(a, b, c), __hneg(a),
                    hsqrt(__habs(a)), __low2half(pair), __float2half_rz(x[i]),
                    __float2half_rd(x[i]), __float2half_ru(x[i])};
    for (int k = 0; k < 11; ++k) y[k * n + i] = __half_as_ushort(found[k]);
}
extern "C" int run(unsigned short *y, const float *x, int n) {
    unsigned short *device_y;
    float *device_x;
    cudaMalloc(&device_y, 22 * n);
    cudaMalloc(&device_x, 4 * n);
    cudaMemcpy(device_x, x, 4 * n, cudaMemcpyHostToDevice);
    compute<<<(n + 127) / 128, 128>>>(device_y, device_x, n);
    cudaMemcpy(y, device_y, 22 * n, cudaMemcpyDeviceToHost);
    return cudaGetLastError();
}
"""


def _pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def _exponents(rng, count):
    """Return numbers of all magnitudes in half precision's range, and of some outside it."""
    return (rng.standard_normal(count) * 2.0 ** rng.uniform(-27, 17, count)).astype(np.float32)


def test_half_precision_is_numpys(load, rng):
    library, _ = load(HALF)
    special = [0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 2**-24, 2**-25, 1.5 * 2**-24]
    x = np.concatenate([_exponents(rng, 4000), np.float32(special)])
    y = np.empty((11, x.size), np.uint16)
    assert library.run(_pointer(y), _pointer(x), x.size) == 0
    with np.errstate(all="ignore"):
        a, b, c = (np.roll(x, -by).astype(np.float16) for by in range(3))
        exact = a.astype(np.float64) * b + c
        below = np.where(a > x, np.nextafter(a, np.float16(-np.inf)), a)
        above = np.where(a < x, np.nextafter(a, np.float16(np.inf)), a)
        expected = [
            *(a, a + b, a * b, a / b, exact.astype(np.float16), -a, np.sqrt(np.abs(a))),
            *(exact.astype(np.float16), np.where(x < 0, above, below), below, above),
        ]
    for index, each in enumerate(expected):
        found = y[index].view(np.float16)
        np.testing.assert_array_equal(found, each, err_msg=str(index))


MATRICES = """
#include <mma.h>
using namespace nvcuda;
template <class T, int K, class Sum, class Number>
__global__ void product(Sum *y, const Number *a, const Number *b) {
    __shared__ Sum tile[4][16 * 16];
    wmma::fragment<wmma::matrix_a, 16, 16, K, T, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, K, T, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, K, Sum> sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int k = 0; k < 32; k += K) {
        wmma::load_matrix_sync(left, a + k, 32);
        wmma::load_matrix_sync(right, b + k, 32);
        wmma::mma_sync(sum, left, right, sum);
    }
    for (int i = 0; i < sum.num_elements; ++i) sum.x[i] *= Sum(2.0f);
    const int warp = threadIdx.x / 32;
    wmma::store_matrix_sync(tile[warp], sum, 16, wmma::mem_col_major);
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 16; i += blockDim.x)
        y[i] = tile[i / 128][i % 16 * 16 + i / 16];
}
template <class T, int K, class Sum, class Number>
int run(Sum *y, const Number *a, const Number *b) {
    Sum *device_y;
    Number *device_a, *device_b;
    cudaMalloc(&device_y, 256 * sizeof(Sum));
    cudaMalloc(&device_a, 512 * sizeof(Number));
    cudaMalloc(&device_b, 512 * sizeof(Number));
    cudaMemcpy(device_a, a, 512 * sizeof(Number), cudaMemcpyHostToDevice);
    cudaMemcpy(device_b, b, 512 * sizeof(Number), cudaMemcpyHostToDevice);
    product<T, K><<<1, 64>>>(device_y, device_a, device_b);
    cudaMemcpy(y, device_y, 256 * sizeof(Sum), cudaMemcpyDeviceToHost);
    return cudaGetLastError();
}
extern "C" int run_half(float *y, const half *a, const half *b) { return run<half, 16>(y, a, b); }
extern "C" int run_sums(half *y, const half *a, const half *b) { return run<half, 16>(y, a, b); }
extern "C" int run_tf32(float *y, const float *a, const float *b) {
    return run<wmma::precision::tf32, 8>(y, a, b);
}
"""


def test_matrix_functions_multiply(load, rng):
    library, content = load(MATRICES)
    for name, factor, result, error in (
        ("run_half", np.float16, np.float32, 1e-6),
        ("run_sums", np.float16, np.float16, 2e-3),
        ("run_tf32", np.float32, np.float32, 2e-3),
    ):
        for whole in (True, False):
            numbers = (
                rng.integers(-4, 5, (2, 16, 32)) if whole else rng.standard_normal((2, 16, 32))
            )
            a, b = np.ascontiguousarray(numbers.astype(factor))
            y = np.empty((16, 16), result)
            assert getattr(library, name)(_pointer(y), _pointer(a), _pointer(b)) == 0
            expected = 2 * (a.astype(np.float64) @ b.astype(np.float64).T)
            if whole:
                np.testing.assert_array_equal(y, expected, err_msg=name)
            off = np.linalg.norm(y - expected) / np.linalg.norm(expected)
            assert off <= error, (name, off)
            # Bits beyond TF32's are dropped.
            assert whole or name != "run_tf32" or off > 1e-5
    assert findings.located(findings.take(), content) == []
