// Indices beyond what there is.
#include "program.cuh"

__constant__ float weights[25];

__global__ void reads_one_more(float* y, const float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i + 1];  // reads_one_more: reads out of bounds
}
PROGRAM(reads_one_more) {
    Arrays a;
    reads_one_more<<<2, 128>>>(a.y, a.x, a.COUNT);
}

__global__ void reads_one_before(float* y, const float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i - 1];  // reads_one_before: reads out of bounds
}
PROGRAM(reads_one_before) {
    Arrays a;
    reads_one_before<<<2, 128>>>(a.y, a.x, a.COUNT);
}

__global__ void has_no_guard(float* y, const float* x) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 1;  // has_no_guard: writes out of bounds
}
PROGRAM(has_no_guard) {
    Arrays a(250);
    has_no_guard<<<2, 128>>>(a.y, a.x);
}

__global__ void compares_with_at_most(float* y, const float* x, int n) {
    for (int i = threadIdx.x; i <= n; i += blockDim.x) y[i] = 2;  // compares_with_at_most: writes out of bounds
}
PROGRAM(compares_with_at_most) {
    Arrays a;
    compares_with_at_most<<<1, 64>>>(a.y, a.x, a.COUNT);
}

// A row too many of a plane of 16 x 16.
__global__ void forgets_the_halo(float* y, const float* x) {
    const int h = threadIdx.y, w = threadIdx.x;
    float sum = 0;
    for (int p = 0; p < 3; ++p) sum += x[(h + p) * 16 + w];  // forgets_the_halo: reads out of bounds
    y[h * 16 + w] = sum;
}
PROGRAM(forgets_the_halo) {
    Arrays a;
    forgets_the_halo<<<1, dim3(16, 16)>>>(a.y, a.x);
}

// Bytes, where elements are meant.
__global__ void is_given_too_little(float* y, int n) {
    if (threadIdx.x < n) y[threadIdx.x] = 1;  // is_given_too_little: writes out of bounds
}
PROGRAM(is_given_too_little) {
    float* y;
    cudaMalloc(&y, 64);
    is_given_too_little<<<1, 64>>>(y, 64);
    cudaFree(y);
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

__global__ void goes_beyond_a_tile(float* y) {
    __shared__ float tile[32];
    tile[threadIdx.x] = 0;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x + 1];  // goes_beyond_a_tile: index beyond an array
}
PROGRAM(goes_beyond_a_tile) {
    Arrays a;
    goes_beyond_a_tile<<<1, 32>>>(a.y);
}

__global__ void goes_beyond_a_row(float* y) {
    __shared__ float tile[8][8];
    tile[threadIdx.y][threadIdx.x] = 0;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.y][threadIdx.x + 1];  // goes_beyond_a_row: index beyond an array
}
PROGRAM(goes_beyond_a_row) {
    Arrays a;
    goes_beyond_a_row<<<1, dim3(8, 8)>>>(a.y);
}

__global__ void goes_beyond_constants(float* y) {
    y[threadIdx.x] = weights[threadIdx.x];  // goes_beyond_constants: index beyond an array
}
PROGRAM(goes_beyond_constants) {
    Arrays a;
    goes_beyond_constants<<<1, 32>>>(a.y);
}

__global__ void goes_beyond_registers(float* y, int n) {
    float sums[4] = {};
    for (int i = 0; i <= n; ++i) sums[i] += i;  // goes_beyond_registers: index beyond an array
    y[threadIdx.x] = sums[0] + sums[3];
}
PROGRAM(goes_beyond_registers) {
    Arrays a;
    goes_beyond_registers<<<1, 32>>>(a.y, 4);
}

__global__ void takes_a_null_pointer(float* y, const float* x) {
    y[threadIdx.x] = x[threadIdx.x];  // takes_a_null_pointer: illegal address
}
PROGRAM(takes_a_null_pointer) {
    Arrays a;
    takes_a_null_pointer<<<1, 32>>>(a.y, nullptr);
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

__global__ void is_not_aligned(float* y, const float* x) {
    reinterpret_cast<float4*>(y)[threadIdx.x] = *reinterpret_cast<const float4*>(x + threadIdx.x);  // is_not_aligned: misaligned access
}
PROGRAM(is_not_aligned) {
    Arrays a;
    is_not_aligned<<<1, 8>>>(a.y, a.x);
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

__global__ void right_with_guards(float* y, const float* x, int n) {
    __shared__ float tile[128 + 2];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x + 1] = i < n ? x[i] : 0;
    if (!threadIdx.x) tile[0] = i ? x[i - 1] : 0, tile[129] = i + 128 < n ? x[i + 128] : 0;
    __syncthreads();
    if (i < n) y[i] = weights[0] * tile[threadIdx.x] + tile[threadIdx.x + 2];
}
PROGRAM(right_with_guards) {
    Arrays a(250);
    right_with_guards<<<2, 128>>>(a.y, a.x, 250);
}
