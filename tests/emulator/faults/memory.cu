// Memory that was never written, or is there no more.
#include "program.cuh"

__global__ void adds_to_what_is_there(float* y, const float* x) {
    y[threadIdx.x] += x[threadIdx.x];  // adds_to_what_is_there: reads memory that was never written
}
PROGRAM(adds_to_what_is_there) {
    Arrays a;
    adds_to_what_is_there<<<1, 32>>>(a.y, a.x);
}

__global__ void fills_a_part_of_its_tile(float* y, const float* x, int n) {
    __shared__ float tile[64];
    if (threadIdx.x < n) tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];  // fills_a_part_of_its_tile: reads memory that was never written
}
PROGRAM(fills_a_part_of_its_tile) {
    Arrays a;
    fills_a_part_of_its_tile<<<1, 64>>>(a.y, a.x, 60);
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

__global__ void asserts(const float* x) {
    assert(x[threadIdx.x] > 0);  // asserts: stopped
}
PROGRAM(asserts) {
    Arrays a;
    asserts<<<1, 32>>>(a.x);
}

PROGRAM(right_copy) {
    Arrays a;
    copy<<<1, 32>>>(a.y, a.x, a.COUNT);
}
