// Uninitialised or freed memory.
#include "program.cuh"

KERNEL(adds_to_what_is_there, (float* y, const float* x), 1, 32, a.y, a.x) {
    y[threadIdx.x] += x[threadIdx.x];  // adds_to_what_is_there: reads memory that was never written
}

KERNEL(fills_a_part_of_its_tile, (float* y, const float* x, int n), 1, 64, a.y, a.x, 60) {
    __shared__ float tile[64];
    if (threadIdx.x < n) tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];  // fills_a_part_of_its_tile: reads memory that was never written
}

__global__ void copy(float* y, const float* x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        y[i] = x[i];  // is_copied_in_part: reads memory that was never written
}
PROGRAM(is_copied_in_part) {
    Arrays a;
    float *some, host[32] = {};
    cudaMalloc(&some, 64 * sizeof(float));
    cudaMemcpy(some, host, sizeof host, cudaMemcpyHostToDevice);
    copy<<<1, 32>>>(a.y, some, 64);
    cudaFree(some);
}

__global__ void reads_what_is_freed(float* y, const float* x) {
    y[threadIdx.x] = x[threadIdx.x];  // reads_what_is_freed: reads freed memory
}
PROGRAM(reads_what_is_freed) {
    Arrays a;
    float* other;
    cudaMalloc(&other, 128);
    cudaMemset(other, 0, 128);
    cudaFree(other);
    reads_what_is_freed<<<1, 32>>>(a.y, other);
}

__global__ void writes_what_is_freed(float* y) {
    y[threadIdx.x] = 1;  // writes_what_is_freed: writes freed memory
}
PROGRAM(writes_what_is_freed) {
    float* other;
    cudaMalloc(&other, 128);
    cudaFree(other);
    writes_what_is_freed<<<1, 32>>>(other);
}

__global__ void counts_without_a_start(int* counter) {
    atomicAdd(counter, 1);  // counts_without_a_start: reads memory that was never written
}
PROGRAM(counts_without_a_start) {
    int* counter;
    cudaMalloc(&counter, sizeof(int));
    counts_without_a_start<<<1, 32>>>(counter);
    cudaFree(counter);
}

KERNEL(asserts, (const float* x), 1, 32, a.x) {
    assert(x[threadIdx.x] > 0);  // asserts: stopped
}

PROGRAM(right_copy) {
    Arrays a;
    copy<<<1, 32>>>(a.y, a.x, a.COUNT);
}

__global__ void writes_every_other(float* y) { y[2 * threadIdx.x] = 1; }
__global__ void sums_pairs(float* y, const float* x) {
    y[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x + 1];  // writes_every_other_element: reads memory that was never written
}
PROGRAM(writes_every_other_element) {
    Arrays a, b;
    writes_every_other<<<1, 16>>>(a.y);
    sums_pairs<<<1, 16>>>(b.y, a.y);
}

KERNEL(traps, (const float* x), 1, 32, a.x) {
    if (x[threadIdx.x] == 0) __trap();  // traps: stopped
}

// One block's tile is not initialised for the next block.
KERNEL(loads_in_the_first_block_only, (float* y, const float* x), 4, 32, a.y, a.x) {
    __shared__ float tile[32];
    if (!blockIdx.x) tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[blockIdx.x * 32 + threadIdx.x] = tile[31 - threadIdx.x];  // loads_in_the_first_block_only: reads memory that was never written
}

__global__ void takes_a_struct(float* y, const float4* x) {
    const float4 four = x[threadIdx.x];  // takes_a_struct: reads memory that was never written
    y[threadIdx.x] = four.x + four.y + four.z + four.w;
}
PROGRAM(takes_a_struct) {
    Arrays a;
    float* three;
    cudaMalloc(&three, 32 * sizeof(float4));
    cudaMemset(three, 0, 31 * sizeof(float4));
    takes_a_struct<<<1, 32>>>(a.y, (const float4*)three);
    cudaFree(three);
}

PROGRAM(right_part) {
    Arrays a;
    float* some;
    cudaMalloc(&some, 64 * sizeof(float));
    cudaMemset(some, 0, 32 * sizeof(float));
    copy<<<1, 32>>>(a.y, some, 32);
    cudaFree(some);
}

__constant__ float weights[16];
__global__ void takes_weights(float* y) { y[threadIdx.x] = weights[threadIdx.x % 16]; }
PROGRAM(copies_too_much_to_a_variable) {
    Arrays a;
    static const float numbers[32] = {};
    cudaMemcpyToSymbol(weights, numbers, sizeof numbers);  // copies_too_much_to_a_variable: failed CUDA call
    takes_weights<<<1, 32>>>(a.y);
}

PROGRAM(copies_too_much) {
    Arrays a;
    static float numbers[512];
    cudaMemcpy(numbers, a.x, sizeof numbers, cudaMemcpyDeviceToHost);  // copies_too_much: failed CUDA call
}

// Memory that kernels allocate.
__global__ void allocates(float* y, int n) {
    float* const own = new float[n];
    int* const other = (int*)malloc(n * sizeof(int));
    for (int i = 0; i < n; ++i) own[i] = other[n - 1 - i] = i;
    y[threadIdx.x] = own[n - 1] + other[0];
    free(other);
    delete[] own;
}
PROGRAM(right_allocates) {
    Arrays a;
    for (int i = 0; i < 20; ++i) allocates<<<8, 64>>>(a.y, 5);
}

KERNEL(sums_what_it_allocates, (float* y, int n), 1, 32, a.y, 64) {
    float* const own = (float*)malloc(n * sizeof(float));
    float sum = 0;
    for (int i = 0; i < n; ++i) own[i] = i;
    for (int i = 0; i <= n; ++i) sum += own[i];  // sums_what_it_allocates: reads out of bounds
    free(own);
    y[threadIdx.x] = sum;
}

KERNEL(reads_what_it_deleted, (float* y, int n), 1, 1, a.y, 64) {
    float* const own = new float[n];
    for (int i = 0; i < n; ++i) own[i] = i;
    delete[] own;
    y[threadIdx.x] = own[n / 2];  // reads_what_it_deleted: reads freed memory
}

// A variable by its address.
__device__ float settings[4];
__global__ void reads_settings(float* y) { y[threadIdx.x] = __ldca(settings + threadIdx.x % 4); }
PROGRAM(right_symbol_address) {
    Arrays a;
    const float host[4] = {1, 2, 3, 4};
    void* address;
    cudaGetSymbolAddress(&address, settings);
    cudaMemcpy(address, host, sizeof host, cudaMemcpyHostToDevice);
    reads_settings<<<1, 32>>>(a.y);
}

PROGRAM(frees_twice) {
    Arrays a;
    float* z;
    cudaMalloc(&z, 64);
    cudaFree(z);
    cudaFree(z);  // frees_twice: failed cudaFree()
}

PROGRAM(reads_on_the_host) {
    Arrays a;
    static volatile float kept;
    kept = a.x[3];  // reads_on_the_host: the host touches memory of the GPU
}

PROGRAM(copies_on_the_host) {
    Arrays a;
    static float numbers[Arrays::COUNT];
    memcpy(numbers, a.x, sizeof numbers);  // copies_on_the_host: the host touches memory of the GPU
}

PROGRAM(right_managed_memory) {
    float* both;
    cudaMallocManaged(&both, 64);
    memset(both, 0, 64);
    both[1] = 1;
    cudaFree(both);
}
