// Barriers and warp functions that not all threads reach.
#include "program.cuh"

KERNEL(ends_before_the_barrier, (float* y, int n), 1, 64, a.y, 40) {
    __shared__ float tile[64];
    if (threadIdx.x >= n) return;
    tile[threadIdx.x] = 1;
    __syncthreads();  // ends_before_the_barrier: __syncthreads() that not all threads of the block reach
    y[threadIdx.x] = tile[threadIdx.x];
}

KERNEL(waits_in_a_branch, (float* y), 1, 64, a.y) {
    if (threadIdx.x < 32)
        __syncthreads();  // waits_in_a_branch: __syncthreads() that not all threads of the block reach
    y[threadIdx.x] = 1;
}

KERNEL(waits_in_both_branches, (float* y), 1, 64, a.y) {
    if (threadIdx.x < 32) {
        y[threadIdx.x] = 1;
        __syncthreads();
    } else {
        y[threadIdx.x] = 2;
        __syncthreads();  // waits_in_both_branches: threads of a block wait at different __syncthreads()
    }
}

KERNEL(waits_as_often_as_its_number, (float* y), 1, 64, a.y) {
    for (int i = 0; i < threadIdx.x % 2 + 1; ++i)
        __syncthreads();  // waits_as_often_as_its_number: __syncthreads() that not all threads of the block reach
    y[threadIdx.x] = 1;
}

KERNEL(shuffles_in_a_branch, (float* y, const float* x), 1, 32, a.y, a.x) {
    float value = x[threadIdx.x];
    if (threadIdx.x < 16)
        value += __shfl_down_sync(0xFFFFFFFF, value, 8);  // shuffles_in_a_branch: deadlock
    __syncthreads();
    y[threadIdx.x] = value;
}

KERNEL(is_not_in_its_mask, (float* y, const float* x), 1, 32, a.y, a.x) {
    y[threadIdx.x] = __shfl_sync(0x0000FFFF, x[threadIdx.x], 0);  // is_not_in_its_mask: wrong mask
}

KERNEL(reads_a_lane_outside, (float* y, const float* x), 1, 32, a.y, a.x) {
    if (threadIdx.x < 16)
        y[threadIdx.x] = __shfl_down_sync(0x0000FFFF, x[threadIdx.x], 8);  // reads_a_lane_outside: wrong mask
}

KERNEL(gives_two_masks, (float* y, const float* x), 1, 32, a.y, a.x) {
    const unsigned mask = threadIdx.x < 16 ? 0xFFFFFFFF : 0xFFFF0000;
    y[threadIdx.x] = __shfl_xor_sync(mask, x[threadIdx.x], 1);  // gives_two_masks: deadlock
    __syncthreads();
}

KERNEL(right_reduction, (float* y, const float* x), 1, 64, a.y, a.x) {
    float value = x[threadIdx.x] + 1;
    for (int by = 16; by; by /= 2) value += __shfl_down_sync(0xFFFFFFFF, value, by);
    if (threadIdx.x % 32 < 8) value = __shfl_sync(0xFF, value, 0, 8);
    if (__any_sync(0xFFFFFFFF, threadIdx.x == 0)) y[threadIdx.x] = value;
}

KERNEL(right_counts, (int* y), 1, 64, (int*)a.y) {
    const int even = __syncthreads_count(threadIdx.x % 2 == 0);
    const int all = __syncthreads_and(threadIdx.x < 64), none = __syncthreads_or(threadIdx.x > 63);
    y[threadIdx.x] = even + all + none;
}

KERNEL(waits_without_itself, (float* y, const float* x), 1, 32, a.y, a.x) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncwarp(0xFFFF);  // waits_without_itself: wrong mask
    y[threadIdx.x] = tile[threadIdx.x];
}

KERNEL(shuffles_from_ended_lanes, (float* y, const float* x, int n), 1, 32, a.y, a.x, 20) {
    if (threadIdx.x >= n) return;
    float value = x[threadIdx.x];
    for (int by = 16; by; by /= 2)
        value += __shfl_down_sync(0xFFFFFFFF, value, by);  // shuffles_from_ended_lanes: wrong mask
    if (!threadIdx.x) y[0] = value;
}

// The warp's second half waits for its block, and the first for the second.
KERNEL(waits_for_warp_and_block, (float* y, const float* x), 1, 64, a.y, a.x) {
    if (threadIdx.x % 32 < 16)
        __syncwarp();  // waits_for_warp_and_block: deadlock
    __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}

KERNEL(waits_for_no_one, (float* y, volatile int* flag), 1, 32, a.y, (volatile int*)a.x) {
    if (!threadIdx.x)
        while (!*flag) {}  // waits_for_no_one: deadlock
    __syncthreads();
    y[threadIdx.x] = 1;
}

KERNEL(never_unlocks, (float* y, int* lock), 1, 32, a.y, (int*)a.x) {
    while (atomicCAS(lock, 0, 1)) {}  // never_unlocks: deadlock
    y[0] = threadIdx.x;
}

// The order of a lock depends on arrival: all threads get their turn.
KERNEL(right_lock, (float* sum, int* lock), 4, 32, a.x, (int*)a.x + 1) {
    while (atomicCAS(lock, 0, 1)) {}
    __threadfence();
    atomicAdd(sum, 1.0f);
    __threadfence();
    atomicExch(lock, 0);
}

// The first wait is for the last thread.
KERNEL(right_turns, (int* turn), 1, 64, (int*)a.x) {
    const int own = blockDim.x - 1 - threadIdx.x;
    while (atomicAdd(turn, 0) != own) {}
    atomicAdd(turn, 1);
}

KERNEL(right_branch_of_a_block, (float* y, const float* x), 2, 64, a.y, a.x) {
    __shared__ float tile[64];
    if (blockIdx.x % 2) {
        tile[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        y[threadIdx.x] = tile[63 - threadIdx.x];
    }
}

KERNEL(right_half_a_warp, (float* y, const float* x), 1, 64, a.y, a.x) {
    float value = x[threadIdx.x];
    const unsigned mask = __ballot_sync(0xFFFFFFFF, threadIdx.x % 2);
    if (threadIdx.x % 2) value += __shfl_xor_sync(mask, value, 2);
    y[threadIdx.x] = value;
}

// Whole warps end before the other warps' warp functions.
KERNEL(right_early_end, (float* y, const float* x, int n), 1, 96, a.y, a.x, 64) {
    if (threadIdx.x >= n) return;
    y[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFF, x[threadIdx.x], 16);
}

// CUDA C++ Programming Guide, "Warp Vote Functions": active threads elect one.
KERNEL(right_active_lanes, (int* count, int* y), 1, 64, (int*)a.x, (int*)a.y) {
    if (threadIdx.x % 3) return;
    const unsigned mask = __activemask();
    const int lane = threadIdx.x % 32, leader = __ffs(mask) - 1;
    int first = 0;
    if (lane == leader) first = atomicAdd(count, __popc(mask));
    first = __shfl_sync(mask, first, leader);
    y[first + __popc(mask & ((1u << lane) - 1))] = threadIdx.x;
    // One atomic function for each warp.
    if (!threadIdx.x) assert(__popc(mask) == 11);
}

// As many arrive as there are threads, but the count is for blocks.
KERNEL(waits_for_more_than_come, (int* arrived), 2, 32, (int*)a.x) {
    if (threadIdx.x) return;
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < blockDim.x) {}  // waits_for_more_than_come: deadlock
}
