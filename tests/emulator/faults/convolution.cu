// Convolutions, each wrong in an index, a size, a tile or its launch.
#include "program.cuh"

// The layer: images, channels, height and width; filters and their size; the output's.
enum { B = 2, C = 3, H = 12, W = 14, M = 4, K = 3, OH = H - K + 1, OW = W - K + 1 };

#define X(b, c, h, w) x[(((b) * C + (c)) * H + (h)) * W + (w)]
#define F(m, c, p, q) f[(((m) * C + (c)) * K + (p)) * K + (q)]
#define Y(b, m, h, w) y[(((b) * M + (m)) * OH + (h)) * OW + (w)]
#define EACH_TAP                    \
    for (int c = 0; c < C; ++c)     \
        for (int p = 0; p < K; ++p) \
            for (int q = 0; q < K; ++q)
// A block computes a plane of the output, a thread an element.
#define OWN const int b = blockIdx.x, m = blockIdx.y, h = threadIdx.y, w = threadIdx.x

struct Layer {
    float *x, *f, *y;

    Layer() {
        cudaMalloc(&x, B * C * H * W * sizeof(float));
        cudaMalloc(&f, M * C * K * K * sizeof(float));
        cudaMalloc(&y, B * M * OH * OW * sizeof(float));
        // Many threads may write the same number.
        static float numbers[B * C * H * W];
        for (int i = 0; i < B * C * H * W; ++i) numbers[i] = i;
        cudaMemcpy(x, numbers, sizeof numbers, cudaMemcpyHostToDevice);
        cudaMemset(f, 0, M * C * K * K * sizeof(float));
    }
    ~Layer() {
        cudaFree(x);
        cudaFree(f);
        cudaFree(y);
    }
};

#define KERNEL_OF_LAYER(name, ...) KERNEL_AFTER(name, Layer a, __VA_ARGS__)
#define LAYER (float* y, const float* x, const float* f)
#define CONVOLUTION(name) KERNEL_OF_LAYER(name, LAYER, dim3(B, M), dim3(OW, OH), a.y, a.x, a.f)

// --- Off by one, in each index.

CONVOLUTION(takes_the_next_image) {
    OWN;
    float sum = 0;
    EACH_TAP sum += X(b + 1, c, h + p, w + q) * F(m, c, p, q);  // takes_the_next_image: reads out of bounds
    Y(b, m, h, w) = sum;
}

// --- Strides and guards.

CONVOLUTION(takes_its_height_for_the_width) {
    OWN;
    y[((b * M + m) * OH + h) * OH + w] = X(b, 0, h, w);  // takes_its_height_for_the_width: race between threads of a block
}

CONVOLUTION(takes_channels_for_filters) {
    OWN;
    y[((b * C + m) * OH + h) * OW + w] = X(b, 0, h, w);  // takes_channels_for_filters: race between blocks
}

KERNEL_OF_LAYER(guards_the_wrong_dimension, LAYER, dim3(B, M), dim3(16, 16), a.y, a.x, a.f) {
    OWN;
    if (h < OW && w < OH)
        Y(b, m, h, w) = X(b, 0, h, w);  // guards_the_wrong_dimension: writes out of bounds
}

// --- Launches that omit elements, which stay uninitialised.

__global__ void fill(float* y, const float* x) {
    const int b = blockIdx.z / M, m = blockIdx.z % M;
    const int h = blockIdx.y * 4 + threadIdx.y, w = blockIdx.x * 8 + threadIdx.x;
    if (h < OH && w < OW)
        Y(b, m, h, w) = X(b, 0, h, w);  // exchanges_the_grid_s_sizes: race between blocks
}
__global__ void relu(float* y) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    if (i < B * M * OH * OW)
        y[i] = y[i] > 0 ? y[i] : 0;  // divides_and_rounds_down: reads memory that was never written // exchanges_the_grid_s_sizes: reads memory that was never written
}
static void relu_of(float* y) { relu<<<(B * M * OH * OW + 63) / 64, 64>>>(y); }

PROGRAM(divides_and_rounds_down) {
    Layer a;
    fill<<<dim3(OW / 8, OH / 4, B * M), dim3(8, 4)>>>(a.y, a.x);
    relu_of(a.y);
}
PROGRAM(exchanges_the_grid_s_sizes) {
    Layer a;
    fill<<<dim3((OH + 3) / 4, (OW + 7) / 8, B * M), dim3(4, 8)>>>(a.y, a.x);
    relu_of(a.y);
}


// --- Tiles in shared memory, of 8 x 8 outputs.

enum { TILE = 8, SIDE = TILE + K - 1 };
#define TILED \
    const int b = blockIdx.z, tx = threadIdx.x, ty = threadIdx.y; \
    const int w0 = blockIdx.x * TILE, h0 = blockIdx.y * TILE, h = h0 + ty, w = w0 + tx
#define IN(c, h, w) ((h) < H && (w) < W ? X(b, c, h, w) : 0.0f)
#define GRID dim3((OW + TILE - 1) / TILE, (OH + TILE - 1) / TILE, B)
#define TILES(name) KERNEL_OF_LAYER(name, LAYER, GRID, dim3(TILE, TILE), a.y, a.x, a.f)
#define FILL(to, c)                                 \
    for (int i = ty; i < SIDE; i += TILE)           \
        for (int j = tx; j < SIDE; j += TILE) (to)[i * SIDE + j] = IN(c, h0 + i, w0 + j)

TILES(leaves_the_corner_out) {
    __shared__ float tile[SIDE * SIDE];
    TILED;
    tile[ty * SIDE + tx] = IN(0, h, w);
    if (tx < K - 1) tile[ty * SIDE + tx + TILE] = IN(0, h, w + TILE);
    if (ty < K - 1) tile[(ty + TILE) * SIDE + tx] = IN(0, h + TILE, w);
    __syncthreads();
    float sum = 0;
    for (int p = 0; p < K; ++p)
        for (int q = 0; q < K; ++q)
            sum += tile[(ty + p) * SIDE + tx + q];  // leaves_the_corner_out: reads memory that was never written
    if (h < OH && w < OW) Y(b, 0, h, w) = sum;
}

TILES(uses_its_tile_at_once) {
    __shared__ float tile[SIDE * SIDE];
    TILED;
    FILL(tile, 0);  // uses_its_tile_at_once: race between threads of a block
    float sum = 0;
    for (int p = 0; p < K; ++p)
        sum += tile[(ty + p) * SIDE + tx + p];  // uses_its_tile_at_once: race between threads of a block // uses_its_tile_at_once: reads memory that was never written
    if (h < OH && w < OW) Y(b, 0, h, w) = sum;
}

// --- Two tiles in turns.

TILES(right_double_buffer) {
    __shared__ float tiles[2][SIDE * SIDE];
    TILED;
    float sum = 0;
    FILL(tiles[0], 0);
    for (int c = 0; c < C; ++c) {
        __syncthreads();
        if (c + 1 < C) FILL(tiles[(c + 1) % 2], c + 1);
        for (int p = 0; p < K; ++p) sum += tiles[c % 2][(ty + p) * SIDE + tx + p];
    }
    if (h < OH && w < OW) Y(b, 0, h, w) = sum;
}

TILES(fills_the_tile_that_it_reads) {
    __shared__ float tiles[2][SIDE * SIDE];
    TILED;
    float sum = 0;
    FILL(tiles[0], 0);
    for (int c = 0; c < C; ++c) {
        __syncthreads();
        if (c + 1 < C) FILL(tiles[c % 2], c + 1);  // fills_the_tile_that_it_reads: race between threads of a block
        for (int p = 0; p < K; ++p)
            sum += tiles[c % 2][(ty + p) * SIDE + tx + p];  // fills_the_tile_that_it_reads: race between threads of a block
    }
    if (h < OH && w < OW) Y(b, 0, h, w) = sum;
}

// --- Unrolled inputs in a workspace.

__global__ void unroll(float* columns, const float* x, int b) {
    const int i = blockIdx.x * 64 + threadIdx.x, h = i / OW, w = i % OW, c = blockIdx.y;
    if (i >= OH * OW) return;
    for (int p = 0; p < K; ++p)
        for (int q = 0; q < K; ++q)
            columns[((c * K + p) * K + q) * OH * OW + i] = X(b, c, h + p, w + q);  // unrolls_into_one_channel_s_room: writes out of bounds // unrolls_into_freed_memory: writes freed memory
}
__global__ void multiply(float* y, const float* columns, const float* f, int b) {
    const int i = blockIdx.x * 64 + threadIdx.x, m = blockIdx.y;
    if (i >= OH * OW) return;
    float sum = 0;
    for (int k = 0; k < C * K * K; ++k)
        sum += f[m * C * K * K + k] * columns[k * OH * OW + i];  // frees_its_workspace_too_soon: reads freed memory // unrolls_too_few_channels: reads memory that was never written // unrolls_into_one_channel_s_room: reads out of bounds // unrolls_into_freed_memory: reads freed memory
    y[(b * M + m) * OH * OW + i] = sum;
}
enum { BLOCKS = (OH * OW + 63) / 64, COLUMNS = C * K * K * OH * OW };

static void unrolled(int room, int channels, bool freed_before, bool freed_between) {
    Layer a;
    float* columns;
    cudaMalloc(&columns, room * sizeof(float));
    if (freed_before) cudaFree(columns);
    for (int b = 0; b < B; ++b) {
        unroll<<<dim3(BLOCKS, channels), 64>>>(columns, a.x, b);
        if (freed_between && !b) cudaFree(columns);
        multiply<<<dim3(BLOCKS, M), 64>>>(a.y, columns, a.f, b);
        if (freed_between) return;
    }
    if (!freed_before) cudaFree(columns);
}
PROGRAM(frees_its_workspace_too_soon) { unrolled(COLUMNS, C, false, true); }
PROGRAM(unrolls_too_few_channels) { unrolled(COLUMNS, C - 1, false, false); }
PROGRAM(unrolls_into_one_channel_s_room) { unrolled(K * K * OH * OW, C, false, false); }
PROGRAM(unrolls_into_freed_memory) { unrolled(COLUMNS, C, true, false); }

// Blocks of all images use the workspace of one.
KERNEL_OF_LAYER(shares_a_workspace, (float* y, const float* x, float* room), B, OW, a.y, a.x, a.f) {
    room[threadIdx.x] = X(blockIdx.x, 0, 0, threadIdx.x);  // shares_a_workspace: race between blocks
    __syncthreads();
    y[blockIdx.x * OW + threadIdx.x] = room[OW - 1 - threadIdx.x];  // shares_a_workspace: race between blocks
}

// --- Filters in constant memory.

__constant__ float filters[M * C * K * K];
__constant__ float biases[M];

KERNEL_OF_LAYER(takes_a_filter_beyond_constants, (float* y, const float* x, int m), 1, 32, a.y, a.x, M) {
    const float* const own = filters + m * C * K * K;
    float sum = 0;
    for (int i = 0; i < C * K * K; ++i) sum += own[i] * x[threadIdx.x];  // takes_a_filter_beyond_constants: reads out of bounds
    y[threadIdx.x] = sum;
}

__device__ float taken(const float* from, int i) { return from[i]; }  // takes_a_bias_too_many: reads out of bounds

KERNEL_OF_LAYER(takes_a_bias_too_many, (float* y), 1, M + 1, a.y) { y[threadIdx.x] = taken(biases, threadIdx.x); }
