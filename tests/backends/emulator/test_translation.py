"""Translation of CUDA to C++ with the same lines; unsupported features are reported with their
line."""

import ctypes

import pytest

from ece408_op.backends.emulator import findings, translation
from ece408_op.errors import KernelCompileFailed, KernelNotSupported

# Kernels of templates, in namespaces, by macros, by a pointer, in a lambda.
LAUNCHES = """
#include <cuda_runtime.h>
#include <cooperative_groups.h>
#define LAUNCH(kernel, n, ...) kernel<<<(n + 31) / 32, 32>>>(__VA_ARGS__)
#define MARK "<<<1, 1>>>" /* kernel<<<1, 1>>>(0); */
struct Sizes { int n; float by; };
namespace outer { namespace inner {
template <class T, int N = 2>
__global__ __launch_bounds__(32) void scale(T *y, int n, T by) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = y[i] * by + (N >> 1) - 1;  // kernel<<<1, 1>>>(y)
}
} }
static __device__ __noinline__ float twice(float x) { return 2 * x; }
__global__ void with_struct(float *y, const Sizes sizes) {
    if (threadIdx.x < sizes.n) y[threadIdx.x] = twice(y[threadIdx.x]) * sizes.by / 2;
}
__global__ void nothing() {}
template <class T>
void through(T *y, int n) {
    outer::inner::scale<T><<<dim3((n + 31) / 32, 1), dim3(32)>>>(y, n, T(2));
    outer :: inner :: scale<T, (4 > 3 ? 2 : 3)>
        <<<
            n >> 5, 32, 0, 0
        >>>(y,
            n, static_cast<T>(1));
}
extern "C" int run(float *host, int n) {
    float *y;
    cudaMalloc(&y, n * sizeof(float));
    cudaMemcpy(y, host, n * sizeof(float), cudaMemcpyHostToDevice);
    through(y, n);
    void (*chosen)(float *, const Sizes) = n > 1 ? with_struct : nullptr;
    chosen<<<1, 32>>>(y, Sizes{n, 3});
    (*chosen)<<<1, 32>>>(y, Sizes{n, 1});
    void (*const table[])(float *, const Sizes) = {with_struct};
    table[n - n]<<<1, 32>>>(y, Sizes{0, 1});
    LAUNCH(outer::inner::scale, n, y, n, 1.f);
    const auto last = [=] { nothing<<<1, 1>>>(); };
    last();
    cudaMemcpy(host, y, n * sizeof(float), cudaMemcpyDeviceToHost);
    cudaFree(y);
    return cudaGetLastError() + !sizeof MARK;
}
"""


def test_launches_of_all_kinds(load):
    library, _ = load(LAUNCHES)
    numbers = (ctypes.c_float * 32)(*range(32))
    assert library.run(numbers, 32) == 0
    assert list(numbers) == [6 * each for each in range(32)]


# Shared arrays: several in a declaration, of several dimensions, sized by a template or a launch.
SHARED = """
#include <cuda_runtime.h>
struct Pair { float a, b; };
template <int N>
__global__ void sums(float *y) {
    __shared__ float rows[N][N + 1], columns[N + 1]
        [N], one;
    static __shared__ __align__(16) Pair pairs[2 * N];
    alignas(8) __shared__ alignas(alignof(Pair)) float aligned[2];
    aligned[1] = 0;
    volatile __shared__ int count;
    extern __shared__ alignas(16) float all[];
    Pair *const behind = (Pair *)&all[N];
    const int i = threadIdx.x;
    if (!i) one = 1, count = N;
    __syncthreads();
    rows[i][N] = i;
    columns[N][i] = one;
    pairs[2 * i] = {float(count), 2};
    all[i] = 1;
    behind[i].a = 5;
    __syncthreads();
    y[i] = rows[N - 1 - i][N] + columns[N][i] + pairs[2 * (N - 1 - i)].a + all[N - 1 - i];
    y[i] += behind[N - 1 - i].a + sizeof rows / 4 + sizeof columns / 4;
}
extern "C" int run(float *host) {
    float *y;
    cudaMalloc(&y, 4096);
    sums<8><<<1, 8, 8 * 12>>>(y);
    sums<4><<<1, 4, 4 * 12>>>(y + 8);
    cudaMemcpy(host, y, 48, cudaMemcpyDeviceToHost);
    return cudaGetLastError();
}
"""


def test_shared_variables_of_all_kinds(load):
    library, content = load(SHARED)
    numbers = (ctypes.c_float * 12)()
    library.ece408_emulator_set(1, 1, 0, ctypes.c_uint64(0))
    assert library.run(numbers) == 0
    expected = [n - 1 - i + 1 + n + 1 + 5 + 2 * n * (n + 1) for n in (8, 4) for i in range(n)]
    assert list(numbers) == expected
    assert findings.located(findings.take(), content) == []


LIMITS = """
#include <cuda_runtime.h>
__global__ void nothing() {}
__global__ void large() { __shared__ float a[6 << 10], b[6 << 10], c[1]; a[0] = b[0] = c[0] = 0; }
extern "C" int run(int x, int y, int z, int bytes, int blocks) {
    nothing<<<dim3(1, blocks), dim3(x, y, z), bytes>>>();
    return cudaGetLastError();
}
extern "C" int run_large(void) { large<<<1, 1>>>(); return cudaGetLastError(); }
extern "C" int allow(int bytes) {
    return cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
extern "C" int copy(void) {
    int here = 0;
    return cudaMemcpy(&here, &here, sizeof here, cudaMemcpyDeviceToHost);
}
"""


def test_limits_are_a_gpus(load):
    library, _ = load(LIMITS)
    assert library.run(32, 32, 1, 0, 1) == 0
    for size in ((1025, 1, 1), (32, 33, 1), (1, 1, 65), (0, 1, 1)):
        assert library.run(*size, 0, 1) == 9, size
    assert library.run(1, 1, 1, 0, 65536) == 9
    assert library.run(1, 1, 1, 48 * 1024 + 1, 1) == 1
    assert library.run_large() == 1
    assert library.copy() == 1
    assert library.allow(228 << 10) == 1
    assert library.allow(100 << 10) == 0
    assert library.run(1, 1, 1, 100 << 10, 1) == 1  # the error for exceeding the limit
    assert library.run(1, 1, 1, 100 << 10, 1) == 0


UNKNOWN = [
    ('asm volatile("bar.sync 0;");', "PTX (asm) cannot run without a GPU"),
    ("texture<float> t;", "textures cannot run without a GPU"),
    ("kernel<<<1, 1>>>;", "'<<<' begins no launch that has an end"),
    ("; <<<1, 1>>>(1);", "no kernel's name stands before '<<<'"),
]


@pytest.mark.parametrize(("line", "reason"), UNKNOWN)
def test_what_is_not_emulated_is_said_with_its_line(load, line, reason):
    text = (
        f"#include <cuda_runtime.h>\n__global__ void kernel() {{}}\nvoid run() {{\n    {line}\n}}\n"
    )
    error = KernelNotSupported if "without a GPU" in reason else KernelCompileFailed
    with pytest.raises(error) as caught:
        load(text)
    assert str(caught.value).endswith(f"program.cu:4: {reason}")


# Shared variables at namespace scope: one per running block, in each kernel that names them.
OUTSIDE = """
#include <cuda_runtime.h>
namespace mine {
extern __shared__ float all[];
__shared__ float rows[2][4], one;
}
using namespace mine;
__global__ void first(float *y, const float *none) {
    rows[1][threadIdx.x] = threadIdx.x;
    all[threadIdx.x] = 10;
    if (!threadIdx.x) one = 3 + (none == nullptr);
    __syncthreads();
    y[blockIdx.x * 4 + threadIdx.x] = rows[1][3 - threadIdx.x] + all[3 - threadIdx.x] + one;
}
extern "C" int run(float *host) {
    float *y;
    cudaMalloc(&y, 32);
    first<<<2, 4, 16>>>(y, NULL);
    cudaMemcpy(host, y, 32, cudaMemcpyDeviceToHost);
    return cudaGetLastError();
}
"""


def test_shared_variables_outside_of_functions(load):
    library, content = load(OUTSIDE)
    numbers = (ctypes.c_float * 8)()
    assert library.run(numbers) == 0
    assert list(numbers) == [17, 16, 15, 14] * 2
    assert findings.located(findings.take(), content) == []


def test_a_compiler_s_error_has_the_file_s_own_line(load):
    text = (
        "#include <cuda_runtime.h>\n__global__ void kernel(float *y) {\n    y[0] = undeclared;\n}\n"
    )
    with pytest.raises(KernelCompileFailed, match=r"program.cu:3: .undeclared. was not declared"):
        load(text)


def test_lines_stay():
    text = (
        '# 1 "a.cu"\n__shared__ float\n  a[2],\n  b;\nkernel\n<<<1,\n1>>>(\n2);\n__noinline__ x\n'
    )
    translated = translation.translate(text)
    assert translated.count("\n") == text.count("\n")
    assert translated.splitlines()[-1] == "__attribute__((noinline)) x"
