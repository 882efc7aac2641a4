// Barriers and functions of a warp that not all come to.
#include "program.cuh"

__global__ void ends_before_the_barrier(float* y, int n) {
    __shared__ float tile[64];
    if (threadIdx.x >= n) return;
    tile[threadIdx.x] = 1;
    __syncthreads();  // ends_before_the_barrier: __syncthreads() that not all threads of the block reach
    y[threadIdx.x] = tile[threadIdx.x];
}
PROGRAM(ends_before_the_barrier) {
    Arrays a;
    ends_before_the_barrier<<<1, 64>>>(a.y, 40);
}

__global__ void waits_in_a_branch(float* y) {
    if (threadIdx.x < 32)
        __syncthreads();  // waits_in_a_branch: __syncthreads() that not all threads of the block reach
    y[threadIdx.x] = 1;
}
PROGRAM(waits_in_a_branch) {
    Arrays a;
    waits_in_a_branch<<<1, 64>>>(a.y);
}

__global__ void waits_in_both_branches(float* y) {
    if (threadIdx.x < 32) {
        y[threadIdx.x] = 1;
        __syncthreads();
    } else {
        y[threadIdx.x] = 2;
        __syncthreads();  // waits_in_both_branches: threads of a block wait at different __syncthreads()
    }
}
PROGRAM(waits_in_both_branches) {
    Arrays a;
    waits_in_both_branches<<<1, 64>>>(a.y);
}

__global__ void waits_as_often_as_its_number(float* y) {
    for (int i = 0; i < threadIdx.x % 2 + 1; ++i)
        __syncthreads();  // waits_as_often_as_its_number: __syncthreads() that not all threads of the block reach
    y[threadIdx.x] = 1;
}
PROGRAM(waits_as_often_as_its_number) {
    Arrays a;
    waits_as_often_as_its_number<<<1, 64>>>(a.y);
}

__global__ void shuffles_in_a_branch(float* y, const float* x) {
    float value = x[threadIdx.x];
    if (threadIdx.x < 16)
        value += __shfl_down_sync(0xFFFFFFFF, value, 8);  // shuffles_in_a_branch: deadlock
    __syncthreads();
    y[threadIdx.x] = value;
}
PROGRAM(shuffles_in_a_branch) {
    Arrays a;
    shuffles_in_a_branch<<<1, 32>>>(a.y, a.x);
}

__global__ void is_not_in_its_mask(float* y, const float* x) {
    y[threadIdx.x] = __shfl_sync(0x0000FFFF, x[threadIdx.x], 0);  // is_not_in_its_mask: wrong mask
}
PROGRAM(is_not_in_its_mask) {
    Arrays a;
    is_not_in_its_mask<<<1, 32>>>(a.y, a.x);
}

__global__ void reads_a_lane_outside(float* y, const float* x) {
    if (threadIdx.x < 16)
        y[threadIdx.x] = __shfl_down_sync(0x0000FFFF, x[threadIdx.x], 8);  // reads_a_lane_outside: wrong mask
}
PROGRAM(reads_a_lane_outside) {
    Arrays a;
    reads_a_lane_outside<<<1, 32>>>(a.y, a.x);
}

__global__ void gives_two_masks(float* y, const float* x) {
    const unsigned mask = threadIdx.x < 16 ? 0xFFFFFFFF : 0xFFFF0000;
    y[threadIdx.x] = __shfl_xor_sync(mask, x[threadIdx.x], 1);  // gives_two_masks: deadlock
    __syncthreads();
}
PROGRAM(gives_two_masks) {
    Arrays a;
    gives_two_masks<<<1, 32>>>(a.y, a.x);
}

__global__ void right_reduction(float* y, const float* x) {
    float value = x[threadIdx.x] + 1;
    for (int by = 16; by; by /= 2) value += __shfl_down_sync(0xFFFFFFFF, value, by);
    if (threadIdx.x % 32 < 8) value = __shfl_sync(0xFF, value, 0, 8);
    if (__any_sync(0xFFFFFFFF, threadIdx.x == 0)) y[threadIdx.x] = value;
}
PROGRAM(right_reduction) {
    Arrays a;
    right_reduction<<<1, 64>>>(a.y, a.x);
}

__global__ void right_counts(int* y) {
    const int even = __syncthreads_count(threadIdx.x % 2 == 0);
    const int all = __syncthreads_and(threadIdx.x < 64), none = __syncthreads_or(threadIdx.x > 63);
    y[threadIdx.x] = even + all + none;
}
PROGRAM(right_counts) {
    Arrays a;
    right_counts<<<1, 64>>>((int*)a.y);
}
