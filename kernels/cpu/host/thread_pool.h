// parallel_for on a thread pool that copes with busy machines. thread_pool.cpp has the
// implementation.
//
// A call consists of chunks, computed in any order. The caller computes chunks itself, and each
// worker that has a core takes some of them. A worker without a core delays nobody, unless it loses
// its core in the middle of a chunk. There is no barrier within a call: work that needs the
// results of all chunks is another call of `parallel_for`.
#pragma once

#include <string.h>

#include "api/ece408.h"
#include "host/buffer.h"

namespace ece408 {
namespace {

// Calls work(begin, end, thread) on ranges that cover each of `count` chunks once, on at most
// `threads` threads. `thread` is below `threads`; no two calls with the same number run at a time,
// so it selects scratch memory.
template <class Work>
void parallel_for_ranges(int threads, int64_t count, const Work& work) {
    const auto run = [](const void* all, int64_t begin, int64_t end, int thread) {
        (*static_cast<const Work*>(all))(begin, end, thread);
    };
    ece408_parallel_for(threads, count, run, &work);
}

// Calls work(chunk, thread) for each of `count` chunks.
template <class Work>
void parallel_for(int threads, int64_t count, const Work& work) {
    parallel_for_ranges(threads, count, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t chunk = begin; chunk < end; ++chunk) work(chunk, thread);
    });
}

// Memory for `count` zeros, cleared by all threads: a single thread would take as long as the work
// itself.
template <class T>
Buffer<T> parallel_zeros(int threads, int64_t count) {
    constexpr int64_t kChunk = (int64_t{256} << 10) / static_cast<int64_t>(sizeof(T));
    Buffer<T> buffer(count);
    T* const first = buffer;
    if (!first) return buffer;
    parallel_for(threads, (count + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
        const int64_t left = count - chunk * kChunk;
        memset(first + chunk * kChunk, 0,
               static_cast<size_t>(left < kChunk ? left : kChunk) * sizeof(T));
    });
    return buffer;
}

}  // namespace
}  // namespace ece408
