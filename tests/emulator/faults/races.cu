// Threads that access the same memory without synchronisation.
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include "program.cuh"

KERNEL_AFTER(lacks_a_barrier, Arrays a; cudaMemset(a.y, 0, 1024), (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];  // lacks_a_barrier: race between threads of a block
    y[threadIdx.x] = tile[63 - threadIdx.x];  // lacks_a_barrier: race between threads of a block
}

KERNEL(lacks_the_second_barrier, (float* y, const float* x, int n), 1, 64, a.y, a.x, a.COUNT) {
    __shared__ float tile[64];
    float sum = 0;
    for (int i = 0; i < n; i += 64) {
        tile[threadIdx.x] = x[i + threadIdx.x];  // lacks_the_second_barrier: race between threads of a block
        __syncthreads();
        for (int k = 0; k < 64; ++k)
            sum += tile[k];  // lacks_the_second_barrier: race between threads of a block
    }
    y[threadIdx.x] = sum;
}

KERNEL(sums_without_atomics, (float* sum, const float* x), 1, 64, a.x, a.x + 1) {
    *sum += x[threadIdx.x];  // sums_without_atomics: race between threads of a block
}

KERNEL(sums_of_blocks, (float* sum, const float* x), 8, 32, a.x, a.x + 1) {
    if (!threadIdx.x) *sum += x[blockIdx.x];  // sums_of_blocks: race between blocks
}

KERNEL(reads_what_blocks_write, (float* x), 4, 32, a.x) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    const float next = x[(i + 32) % 128];  // reads_what_blocks_write: race between blocks
    x[i] = next;  // reads_what_blocks_write: race between blocks
}

KERNEL(relies_on_its_warp, (float* y, const float* x), 1, 32, a.y, a.x) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];  // relies_on_its_warp: race between threads of a block
    for (int by = 16; by; by /= 2)
        if (threadIdx.x < by)
            tile[threadIdx.x] += tile[threadIdx.x + by];  // relies_on_its_warp: race between threads of a block
    if (!threadIdx.x) y[0] = tile[0];  // relies_on_its_warp: race between threads of a block
}

KERNEL(waits_for_another_warp_only, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];  // waits_for_another_warp_only: race between threads of a block
    __syncwarp();
    y[threadIdx.x] = tile[63 - threadIdx.x];  // waits_for_another_warp_only: race between threads of a block
}

KERNEL(mixes_atomics, (int* counter), 1, 64, (int*)a.x) {
    atomicAdd(counter, 1);  // mixes_atomics: race between threads of a block
    if (!threadIdx.x) *counter = 0;  // mixes_atomics: race between threads of a block
}

KERNEL(right_warps, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ float tile[64];
    float* const own = tile + threadIdx.x / 32 * 32;
    const int lane = threadIdx.x % 32;
    own[lane] = x[threadIdx.x];
    __syncwarp();
    const float other = own[31 - lane];
    __syncwarp();
    own[lane] = other;
    __syncwarp();
    y[threadIdx.x] = own[lane ^ 1];
}

// The last block sums the results of all: CUDA C++ Programming Guide, "Memory Fence Functions".
KERNEL(right_last_block, (float* parts, unsigned* done, float* y), 16, 32, a.y, (unsigned*)a.x, a.x + 1) {
    __shared__ bool is_last;
    if (!threadIdx.x) {
        parts[blockIdx.x] = 1;
        __threadfence();
        is_last = atomicInc(done, gridDim.x) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last || threadIdx.x) return;
    float sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += parts[i];
    *y = sum;
}

KERNEL(reads_the_sum_too_soon, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ float sum;
    if (!threadIdx.x) sum = 0;
    __syncthreads();
    atomicAdd(&sum, x[threadIdx.x]);  // reads_the_sum_too_soon: race between threads of a block
    y[threadIdx.x] = sum;  // reads_the_sum_too_soon: race between threads of a block
}

KERNEL(trusts_volatile, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ float tile[64];
    volatile float* const own = tile;
    own[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x >= 32) return;
    for (int by = 32; by; by /= 2)
        own[threadIdx.x] += own[threadIdx.x + by];  // trusts_volatile: race between threads of a block
    if (!threadIdx.x) y[0] = own[0];
}

KERNEL_AFTER(clears_what_others_add_to, Arrays a; cudaMemset(a.y, 0, 128), (float* y, const float* x),
             4, 32, a.y, a.x) {
    if (!blockIdx.x) y[threadIdx.x] = 0;  // clears_what_others_add_to: race between blocks
    __syncthreads();
    atomicAdd(y + threadIdx.x, x[threadIdx.x]);  // clears_what_others_add_to: race between blocks
}

KERNEL(right_one_thread_writes, (float* y, const float* x), 1, 64, a.x + 64, a.x) {
    __shared__ float first;
    if (threadIdx.x == 63) first = x[0];
    __syncthreads();
    if (first >= 0) y[threadIdx.x] = first;
}

// More launches than the emulator distinguishes at a time.
__global__ void adds_one(float* x) { x[blockIdx.x * 32 + threadIdx.x] += 1; }
PROGRAM(right_many_launches) {
    Arrays a;
    for (int i = 0; i < 600; ++i) {
        adds_one<<<4, 32>>>(a.x);
        adds_one<<<2, 32>>>(a.x + 128);
    }
}

// A warp's tile that is refilled, with only the warp's synchronisation between.
KERNEL(right_tile_of_a_warp, (float* y, const float* x, int n), 1, 64, a.y, a.x, a.COUNT) {
    __shared__ float tile[2][32];
    float* const own = tile[threadIdx.x / 32];
    float sum = 0;
    for (int i = 0; i < n; i += 32) {
        own[threadIdx.x % 32] = x[i + threadIdx.x % 32];
        __syncwarp();
        for (int k = 0; k < 32; ++k) sum += own[k];
        __syncwarp();
    }
    y[threadIdx.x] = sum;
}

KERNEL(right_tiles_of_groups, (float* y, const float* x, int n), 1, 64, a.y, a.x, 4) {
    __shared__ float tiles[64];
    const auto group = cooperative_groups::tiled_partition<8>(cooperative_groups::this_thread_block());
    float* const own = tiles + group.meta_group_rank() * 8;
    float sum = 0;
    // Each group iterates as often as its number.
    for (int i = 0; i <= group.meta_group_rank() % n; ++i) {
        own[group.thread_rank()] = x[i * 8 + group.thread_rank()];
        group.sync();
        for (int k = 0; k < 8; ++k) sum += own[k];
        group.sync();
    }
    y[threadIdx.x] = sum;
}

KERNEL(waits_for_its_group_only, (float* y, const float* x), 1, 32, a.y, a.x) {
    __shared__ float tile[32];
    const auto group = cooperative_groups::tiled_partition<8>(cooperative_groups::this_thread_block());
    for (int i = 0; i < 2; ++i) {
        tile[threadIdx.x] = x[threadIdx.x];  // waits_for_its_group_only: race between threads of a block
        group.sync();
        float sum = 0;
        for (int k = 0; k < 32; ++k)
            sum += tile[k];  // waits_for_its_group_only: race between threads of a block
        group.sync();
        y[threadIdx.x] = sum;
    }
}

__device__ void lock(int* held) {
    while (atomicCAS(held, 0, 1)) {}
    __threadfence();
}
__device__ void unlock(int* held) {
    __threadfence();
    atomicExch(held, 0);
}
KERNEL(right_mutex, (int* held, float* sum), 16, 64, (int*)a.x, a.x + 1) {
    if (threadIdx.x % 32) return;
    lock(held);
    *sum = *sum + 1;
    unlock(held);
}

KERNEL(right_mutex_held_for_long, (int* held, int* ended, float* sum), 1, 96, (int*)a.x, (int*)a.x + 1,
       a.x + 2) {
    if (threadIdx.x % 32) return;
    if (threadIdx.x == 64) {
        atomicExch(ended, 1);
        return;
    }
    lock(held);
    while (!threadIdx.x && !atomicAdd(ended, 0)) {}
    *sum = *sum + 1;
    unlock(held);
}

KERNEL(looks_after_it_has_unlocked, (int* held, float* sum, float* y), 1, 64, (int*)a.x, a.x + 1, a.y) {
    if (threadIdx.x % 32) return;
    lock(held);
    *sum = *sum + 1;  // looks_after_it_has_unlocked: race between threads of a block
    unlock(held);
    y[threadIdx.x / 32] = *sum;  // looks_after_it_has_unlocked: race between threads of a block
}

KERNEL(right_bytes, (unsigned char* y), 1, 64, (unsigned char*)a.y) {
    __shared__ unsigned char bytes[64];
    __shared__ bool odd[64];
    bytes[threadIdx.x] = threadIdx.x;
    odd[threadIdx.x] = threadIdx.x % 2;
    __syncthreads();
    y[threadIdx.x] = bytes[63 - threadIdx.x] + odd[threadIdx.x ^ 1];
}

KERNEL_AFTER(reads_bytes_too_early, Arrays a; cudaMemset(a.y, 0, 64), (unsigned char* y),
             1, 64, (unsigned char*)a.y) {
    __shared__ unsigned char bytes[64];
    bytes[threadIdx.x] = threadIdx.x;  // reads_bytes_too_early: race between threads of a block
    y[threadIdx.x] = bytes[63 - threadIdx.x];  // reads_bytes_too_early: race between threads of a block
}

KERNEL(sums_halves_of_blocks, (half* sum), 8, 32, (half*)a.x) {
    if (!threadIdx.x) *sum = __hadd(*sum, __float2half(1));  // sums_halves_of_blocks: race between blocks
}

KERNEL(right_flag, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ int any;
    if (!threadIdx.x) any = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += 64)
        if (x[i] == 0) any = 1;
    __syncthreads();
    y[threadIdx.x] = any;
}

KERNEL(clears_a_flag_that_others_set, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ int any;
    if (!threadIdx.x) any = 0;  // clears_a_flag_that_others_set: race between threads of a block
    for (int i = threadIdx.x; i < 256; i += 64)
        if (x[i] == 0) any = 1;  // clears_a_flag_that_others_set: race between threads of a block
    __syncthreads();
    y[threadIdx.x] = any;
}

// CUDA C++ Programming Guide, "Atomic Functions": any operation by atomicCAS.
KERNEL(right_compare_and_swap, (int* largest), 4, 64, (int*)a.x) {
    int old = *largest, assumed;
    do {
        assumed = old;
        old = atomicCAS(largest, assumed, max(assumed, int(threadIdx.x)));
    } while (assumed != old);
}

KERNEL(right_copies_ahead, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ float tiles[2][64];
    const auto fetch = [&](int i) {
        __pipeline_memcpy_async(&tiles[i % 2][threadIdx.x], x + i * 64 + threadIdx.x, 4);
        __pipeline_commit();
    };
    float sum = 0;
    fetch(0);
    for (int i = 0; i < 4; ++i) {
        if (i < 3) fetch(i + 1);
        __pipeline_wait_prior(i < 3);
        __syncthreads();
        sum += tiles[i % 2][63 - threadIdx.x];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}

KERNEL(waits_for_too_few_copies, (float* y, const float* x), 1, 64, a.y, a.x) {
    __shared__ float tiles[2][64];
    const auto fetch = [&](int i) {
        __pipeline_memcpy_async(&tiles[i % 2][threadIdx.x], x + i * 64 + threadIdx.x, 4);  // waits_for_too_few_copies: race between threads of a block
        __pipeline_commit();
    };
    float sum = 0;
    fetch(0);
    for (int i = 0; i < 4; ++i) {
        if (i < 3) fetch(i + 1);
        __pipeline_wait_prior(2);
        __syncthreads();
        sum += tiles[i % 2][63 - threadIdx.x];  // waits_for_too_few_copies: race between threads of a block
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}

__global__ void right_sum_of_doubles(double* sum) {
    auto* const bits = (unsigned long long*)sum;
    unsigned long long old = *bits, assumed;
    do {
        assumed = old;
        old = atomicCAS(bits, assumed, __double_as_longlong(1 + __longlong_as_double(assumed)));
    } while (assumed != old);
}
PROGRAM(right_sum_of_doubles) {
    Arrays a;
    right_sum_of_doubles<<<2, 32>>>((double*)a.x);
    double sum;
    cudaMemcpy(&sum, a.x, sizeof sum, cudaMemcpyDeviceToHost);
    assert(sum == 64);
}
