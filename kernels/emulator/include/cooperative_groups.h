// Cooperative groups of one block: its threads, and tiles of its warps. Grid groups need a special
// launch, and are not emulated.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

class thread_block {
public:
    static void sync() { __syncthreads(); }
    static unsigned thread_rank() {
        return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};

inline thread_block this_thread_block() { return {}; }

// `Size` consecutive lanes of a warp.
template <unsigned Size, class Parent = thread_block>
class thread_block_tile {
    static_assert(Size && Size <= 32 && !(Size & (Size - 1)), "a tile has 1, 2, 4, ... or 32 threads");

public:
    static void sync() { __syncwarp(mask()); }
    static unsigned thread_rank() { return thread_block::thread_rank() % Size; }
    static constexpr unsigned size() { return Size; }
    static constexpr unsigned num_threads() { return Size; }
    static unsigned meta_group_rank() { return thread_block::thread_rank() / Size; }
    static unsigned meta_group_size() { return (thread_block::size() + Size - 1) / Size; }

    template <class T>
    T shfl(T value, int lane) const { return __shfl_sync(mask(), value, lane, Size); }
    template <class T>
    T shfl_up(T value, unsigned by) const { return __shfl_up_sync(mask(), value, by, Size); }
    template <class T>
    T shfl_down(T value, unsigned by) const { return __shfl_down_sync(mask(), value, by, Size); }
    template <class T>
    T shfl_xor(T value, unsigned by) const { return __shfl_xor_sync(mask(), value, by, Size); }
    int any(int predicate) const { return ballot(predicate) != 0; }
    int all(int predicate) const { return !ballot(!predicate); }
    unsigned ballot(int predicate) const { return __ballot_sync(mask(), predicate) >> first(); }

private:
    static unsigned first() { return thread_block::thread_rank() % 32 / Size * Size; }
    static unsigned mask() { return (Size == 32 ? 0xFFFFFFFF : (1u << Size % 32) - 1) << first(); }
};

template <unsigned Size, class Parent>
inline thread_block_tile<Size, Parent> tiled_partition(const Parent&) {
    return {};
}

template <class Group>
inline void sync(const Group& group) {
    group.sync();
}

}  // namespace cooperative_groups
