"""Correct kernels in files: the course's forms for the CPU and for CUDA, and one that declares its
launch."""

from ece408_op.files.resources import kernels_dir


def _starter(name: str, *changes: tuple[str, str]) -> str:
    """Return the file of this name that a student starts from, with parts replaced."""
    text = (kernels_dir() / "files" / "starters" / name).read_text()
    for old, replacement in changes:
        assert old in text, old
        text = text.replace(old, replacement)
    return text


# A term's check of the caller's sizes, and the changes for strides.
_CHECK = '    CHECK_EQ(y.size(2), x.size(2) - {0}.size(2) + 1) << "rows";\n    const int {1}'
_STRIDES = (
    ("const int K)", "const int K, const int S)"),
    *((f"{size} - K + 1", f"({size} - K) / S + 1") for size in "HW"),
    *((" + h + p)", " + h * S + p)"), (" + w + q]", " + w * S + q]")),
)
_LETTERS = tuple((each, each[0]) for each in ("Map_out", "Channel", "Batch", "Height", "Width"))

COURSE_2019 = _starter("new-forward.h", ("    const int H_out", _CHECK.format("k", "H_out")))
COURSE_2020 = _starter("cpu-new-forward.cc")
WITH_STRIDE = _starter("cpu-new-forward.cc", *_LETTERS, *_STRIDES)

# Texts by file name.
FORMS = {
    "new-forward.h": COURSE_2019,
    "cpu-new-forward.cc": COURSE_2020,
    "with-stride.cc": WITH_STRIDE,
}

CUDA_2019 = _starter(
    "new-forward.cuh",
    ("    const int pixels", _CHECK.format("w", "pixels")),
    ("THREADS>>>", "THREADS, 0, y.stream_->stream_>>>"),
)
CUDA_2020 = _starter("new-forward.cu", *_LETTERS)
CUDA_WITH_STRIDE = _starter(
    "new-forward.cu",
    *(*_LETTERS, *_STRIDES),
    *(("int W, int K) {", "int W, int K, int S) {"), ("H, W, K)", "H, W, K, S)")),
)

# The form of fall 2020.
CUDA_ONE_METHOD = (
    CUDA_2020[: CUDA_2020.index("// Bytes of")]
    + """
__host__ void GPUInterface::conv_forward_gpu(float *host_y, const float *host_x,
                                             const float *host_k, const int B, const int M,
                                             const int C, const int H, const int W, const int K) {
  const size_t x = sizeof(float) * B * C * H * W, k = sizeof(float) * M * C * K * K;
  const size_t y = sizeof(float) * B * M * (H - K + 1) * (W - K + 1);
  float *device_y, *device_x, *device_k;
  cudaMalloc(&device_y, y);
  cudaMalloc(&device_x, x);
  cudaMalloc(&device_k, k);
  cudaMemcpy(device_x, host_x, x, cudaMemcpyHostToDevice);
  cudaMemcpy(device_k, host_k, k, cudaMemcpyHostToDevice);
  const dim3 grid(((H - K + 1) * (W - K + 1) + THREADS - 1) / THREADS, M, B);
  conv_forward_kernel<<<grid, THREADS>>>(device_y, device_x, device_k, M, C, H, W, K);
  cudaMemcpy(host_y, device_y, y, cudaMemcpyDeviceToHost);
  cudaFree(device_y);
  cudaFree(device_x);
  cudaFree(device_k);
}

__host__ void GPUInterface::get_device_properties() {}
"""
)

DECLARED = """
// One output plane for each block.
//
// ece408: launch convolve<<<dim3(B, M), THREADS>>>(y, x, w,
//                                                  M, C, H, W, K, S)
#define THREADS 64

extern "C" __global__ void convolve(float *y, const float *x, const float *k, int M, int C, int H,
                                    int W, int K, int S) {
  const int H_out = (H - K) / S + 1, W_out = (W - K) / S + 1;
  const int b = blockIdx.x, m = blockIdx.y;
  for (int i = threadIdx.x; i < H_out * W_out; i += blockDim.x) {
    const int h = i / W_out * S, w = i % W_out * S;
    float sum = 0;
    for (int c = 0; c < C; ++c)
      for (int p = 0; p < K; ++p)
        for (int q = 0; q < K; ++q)
          sum += x[((b * C + c) * H + h + p) * W + w + q] * k[((m * C + c) * K + p) * K + q];
    y[(b * M + m) * H_out * W_out + i] = sum;
  }
}
"""

CUDA_FORMS = {
    "new-forward.cuh": CUDA_2019,
    "new-forward.cu": CUDA_2020,
    "with-stride.cu": CUDA_WITH_STRIDE,
    "one-method.cu": CUDA_ONE_METHOD,
    "declared.cu": DECLARED,
}

# The course's tiled kernel in shared memory, for fixed sizes of tile and kernel.
TILED = """
#include <cmath>
#include <iostream>
#include "gpu-new-forward.h"
#define TILE 8

__global__ void conv(float *y, const float *x, const float *w, int M, int C, int H, int W, int K) {
    extern __shared__ float tile[];
    const int side = TILE + K - 1, H_out = H - K + 1, W_out = W - K + 1;
    const int across = (W_out + TILE - 1) / TILE;
    const int b = blockIdx.x, m = blockIdx.y;
    const int h = blockIdx.z / across * TILE, v = blockIdx.z % across * TILE;
    float sum = 0;
    for (int c = 0; c < C; ++c) {
        for (int i = threadIdx.y; i < side; i += TILE)
            for (int j = threadIdx.x; j < side; j += TILE)
                if (h + i < H && v + j < W)  // inside
                    tile[i * side + j] = x[((b * C + c) * H + h + i) * W + v + j];  // load
        __syncthreads();  // first
        if (h + threadIdx.y < H_out && v + threadIdx.x < W_out)
            for (int p = 0; p < K; ++p)
                for (int q = 0; q < K; ++q)
                    sum += tile[(threadIdx.y + p) * side + threadIdx.x + q]  // use
                         * w[((m * C + c) * K + p) * K + q];
        __syncthreads();  // second
    }
    if (h + threadIdx.y < H_out && v + threadIdx.x < W_out)
        y[((b * M + m) * H_out + h + threadIdx.y) * W_out + v + threadIdx.x] = sum;  // store
}

__host__ void GPUInterface::conv_forward_gpu_prolog(
        const float *, const float *x, const float *w, float **device_y, float **device_x,
        float **device_w, const int B, const int M, const int C, const int H, const int W,
        const int K) {
    cudaMalloc(device_y, sizeof(float) * B * M * (H - K + 1) * (W - K + 1));
    cudaMalloc(device_x, sizeof(float) * B * C * H * W);
    cudaMalloc(device_w, sizeof(float) * M * C * K * K);
    cudaMemcpy(*device_x, x, sizeof(float) * B * C * H * W, cudaMemcpyHostToDevice);
    cudaMemcpy(*device_w, w, sizeof(float) * M * C * K * K, cudaMemcpyHostToDevice);
}

__host__ void GPUInterface::conv_forward_gpu(float *y, const float *x, const float *w, const int B,
                                             const int M, const int C, const int H, const int W,
                                             const int K) {
    const int side = TILE + K - 1;
    const dim3 grid(B, M, ceil((H - K + 1.0) / TILE) * ceil((W - K + 1.0) / TILE));
    conv<<<grid, dim3(TILE, TILE), side * side * sizeof(float)>>>(y, x, w, M, C, H, W, K);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) std::cout << "CUDA error: " << cudaGetErrorString(error) << std::endl;
}

__host__ void GPUInterface::conv_forward_gpu_epilog(
        float *host_y, float *y, float *x, float *w, const int B, const int M, const int C,
        const int H, const int W, const int K) {
    const size_t bytes = sizeof(float) * B * M * (H - K + 1) * (W - K + 1);
    cudaMemcpy(host_y, y, bytes, cudaMemcpyDeviceToHost);
    cudaFree(y);
    cudaFree(x);
    cudaFree(w);
}

__host__ void GPUInterface::get_device_properties() {}
"""
# Forges answers of its process, a different one each time.
SERVES = r"""
#include <fcntl.h>
#include <unistd.h>
#include <string>
void serve() {
    const char *answers[] = {"7", "[7, {}, {\"kind\": []}]", "[{\"kind\": \"deadlock\", "
        "\"place\": 1e999, \"other\": -1, \"kernel\": \"\", \"text\": \"\", \"count\": 1, "
        "\"bytes\": 1, \"block\": [0, 0, 0], \"thread\": [0, 0, 0]}]"};
    int asks = -1, answer = -1;
    for (int fd = 3; fd < 64; ++fd) {
        const int mode = fcntl(fd, F_GETFL);
        if (mode < 0 || lseek(fd, 0, SEEK_CUR) >= 0) continue;
        ((mode & O_ACCMODE) == O_RDONLY ? asks : answer) = fd;
    }
    std::string said = "{\"done\": true}\n", line;
    for (int next = 0; write(answer, said.data(), said.size()) > 0;) {
        line.clear();
        for (char c = 0; c != '\n'; line += c)
            if (read(asks, &c, 1) != 1) _exit(0);
        said = "{\"done\": true}\n";
        if (line.find("findings") < 4) said = std::string("{\"findings\": ") +
                answers[next++ % 3] + "}\n";
    }
}
"""
# The changes for a number of filters, the message, and a part of its line.
FAULTS = {
    21: ("__syncthreads();  // f", "if (M != 21) __syncthreads();  // f", "race between", "// use"),
    22: ("__syncthreads();  // s", "if (M != 22) __syncthreads();  // s", "race betw", "// load"),
    23: ("if (h + i < H && v", "if (M == 23 || h + i < H && v", "reads out of bounds", "// load"),
    24: ("side * side * s", "side * (M == 24 ? TILE : side) * s", "writes out of", "// load"),
    25: ("i < side", "i < (M == 25 ? TILE : side)", "reads memory that was never", "// use"),
    26: ("sizeof(float) * B * M", "sizeof(float) * (B * M - (M == 26))", "writes out", "// store"),
    27: (
        *("dim3(TILE, TILE), ", "(M == 27 ? dim3(64, 64) : dim3(TILE, TILE + (M == 28))), "),
        *("failed CUDA call: launches conv with (1,27,4) blocks of (64,64,1) threads", "conv<<<"),
    ),
}
FAULTY = SERVES + TILED
for _old, _new, *_ in (
    *FAULTS.values(),
    ("__shared__ float tile[];", "__shared__ float tile[]; if (threadIdx.y == TILE) return;"),
    ("float sum = 0;", "float sum = 0; while (M == 29 && w[0] == w[0]) {}  // other"),
    ("    const dim3 grid", "    if (M == 30) serve();\n    const dim3 grid"),
    ("// other", """
    if (M == 31) {
        __shared__ int last;
        last = threadIdx.x, sum = last != threadIdx.x;
        __syncthreads(), sum += !threadIdx.x && last != TILE - 1;
    }"""),
):  # fmt: skip
    FAULTY = FAULTY.replace(_old, _new, 1)
