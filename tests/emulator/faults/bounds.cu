// Indices out of bounds.
#include "program.cuh"

__constant__ float weights[25];

KERNEL(reads_one_more, (float* y, const float* x, int n), 2, 128, a.y, a.x, a.COUNT) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i + 1];  // reads_one_more: reads out of bounds
}

KERNEL(reads_one_before, (float* y, const float* x, int n), 2, 128, a.y, a.x, a.COUNT) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i - 1];  // reads_one_before: reads out of bounds
}

KERNEL_AFTER(has_no_guard, Arrays a(250), (float* y, const float* x), 2, 128, a.y, a.x) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 1;  // has_no_guard: writes out of bounds
}

// A row too many of a plane of 16 x 16.
KERNEL(forgets_the_halo, (float* y, const float* x), 1, dim3(16, 16), a.y, a.x) {
    const int h = threadIdx.y, w = threadIdx.x;
    float sum = 0;
    for (int p = 0; p < 3; ++p) sum += x[(h + p) * 16 + w];  // forgets_the_halo: reads out of bounds
    y[h * 16 + w] = sum;
}

__global__ void takes_more_dynamic_memory(float* y) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = 1;  // takes_more_dynamic_memory: writes out of bounds
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x];  // takes_more_dynamic_memory: reads out of bounds
}
PROGRAM(takes_more_dynamic_memory) {
    Arrays a;
    takes_more_dynamic_memory<<<1, 64, 63 * sizeof(float)>>>(a.y);
}

KERNEL(goes_beyond_a_row, (float* y), 1, dim3(8, 8), a.y) {
    __shared__ float tile[8][8];
    tile[threadIdx.y][threadIdx.x] = 0;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.y][threadIdx.x + 1];  // goes_beyond_a_row: index beyond an array
}

KERNEL(goes_beyond_constants, (float* y), 1, 32, a.y) {
    y[threadIdx.x] = weights[threadIdx.x];  // goes_beyond_constants: index beyond an array
}

KERNEL(goes_beyond_registers, (float* y, int n), 1, 32, a.y, 4) {
    float sums[4] = {};
    for (int i = 0; i <= n; ++i) sums[i] += i;  // goes_beyond_registers: index beyond an array
    y[threadIdx.x] = sums[0] + sums[3];
}

KERNEL(takes_a_null_pointer, (float* y, const float* x), 1, 32, a.y, nullptr) {
    y[threadIdx.x] = x[threadIdx.x];  // takes_a_null_pointer: illegal address
}

__global__ void takes_the_host_s_array(float* y, const float* x) {
    y[threadIdx.x] = x[threadIdx.x];  // takes_the_host_s_array: illegal address
}
PROGRAM(takes_the_host_s_array) {
    Arrays a;
    float* const copy = new float[32]();
    takes_the_host_s_array<<<1, 32>>>(a.y, copy);
    delete[] copy;
}

KERNEL(is_not_aligned, (float* y, const float* x), 1, 8, a.y, a.x) {
    reinterpret_cast<float4*>(y)[threadIdx.x] = *reinterpret_cast<const float4*>(x + threadIdx.x);  // is_not_aligned: misaligned access
}

__global__ void ends_in_the_midst_of_a_vector(float4* y, const float4* x, int n) {
    for (int i = threadIdx.x; 4 * i < n; i += blockDim.x) y[i] = x[i];  // ends_in_the_midst_of_a_vector: reads out of bounds
}
PROGRAM(ends_in_the_midst_of_a_vector) {
    float *x, *y;
    cudaMalloc(&x, 30 * sizeof(float));
    cudaMalloc(&y, 32 * sizeof(float));
    cudaMemset(x, 0, 30 * sizeof(float));
    ends_in_the_midst_of_a_vector<<<1, 8>>>((float4*)y, (const float4*)x, 30);
    cudaFree(x);
    cudaFree(y);
}

KERNEL_AFTER(right_with_guards, Arrays a(250), (float* y, const float* x, int n), 2, 128, a.y, a.x, 250) {
    __shared__ float tile[128 + 2];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x + 1] = i < n ? x[i] : 0;
    if (!threadIdx.x) tile[0] = i ? x[i - 1] : 0, tile[129] = i + 128 < n ? x[i + 128] : 0;
    __syncthreads();
    if (i < n) y[i] = weights[0] * tile[threadIdx.x] + tile[threadIdx.x + 2];
}

KERNEL(is_not_aligned_in_its_tile, (float* y, const float* x), 1, 32, a.y, a.x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    tile[threadIdx.x + 32] = x[threadIdx.x];
    __syncthreads();
    const float4 four = *reinterpret_cast<const float4*>(tile + threadIdx.x % 8 * 4 + 2);  // is_not_aligned_in_its_tile: misaligned access
    y[threadIdx.x] = four.x + four.w;
}

// Halves of an odd number in pairs.
__global__ void takes_pairs_of_halves(float* y, const half2* x, int n) {
    for (int i = threadIdx.x; i < (n + 1) / 2; i += blockDim.x)
        y[i] = __low2float(x[i]) + __high2float(x[i]);  // takes_pairs_of_halves: reads out of bounds
}
PROGRAM(takes_pairs_of_halves) {
    Arrays a;
    half2* x;
    cudaMalloc(&x, 63 * sizeof(half));
    cudaMemset(x, 0, 63 * sizeof(half));
    takes_pairs_of_halves<<<1, 32>>>(a.y, x, 63);
    cudaFree(x);
}

KERNEL(takes_a_pair_between_pairs, (float* y, const half* x), 1, 32, a.y, (const half*)a.x) {
    y[threadIdx.x] = __high2float(*reinterpret_cast<const half2*>(x + threadIdx.x));  // takes_a_pair_between_pairs: misaligned access
}

// Offsets that wrap around below 0.
KERNEL(subtracts_from_unsigned, (float* y, const float* x), 1, 32, a.y, a.x) {
    const unsigned before = threadIdx.x - 1;
    y[threadIdx.x] = x[before];  // subtracts_from_unsigned: illegal address
}

KERNEL_AFTER(right_vectors, Arrays a(250), (float* y, const float* x, int n), 1, 64, a.y, a.x, 250) {
    const int i = threadIdx.x;
    if (4 * i + 4 <= n) reinterpret_cast<float4*>(y)[i] = reinterpret_cast<const float4*>(x)[i];
    if (i < n % 4) y[n / 4 * 4 + i] = x[n / 4 * 4 + i];
}

// Neighbouring threads write the halves of a word.
KERNEL(right_halves, (half* y, const half2* x), 1, 64, (half*)a.y, (const half2*)a.x) {
    const half2 two = x[threadIdx.x / 2];
    y[threadIdx.x] = threadIdx.x % 2 ? __high2half(two) : __low2half(two);
}

// A compiler turns such a loop into one call.
KERNEL(clears_one_more, (float* y, int n), 1, 32, a.y, a.COUNT) {
    if (threadIdx.x) return;
    for (int i = 0; i <= n; ++i) y[i] = 0;  // clears_one_more: writes out of bounds
}
