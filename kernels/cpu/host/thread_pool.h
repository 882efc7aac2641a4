// Threads that share the work of a call, on busy machines as well. thread_pool.cpp has the implementation.
//
// A call's work is a number of pieces, done in any order. The caller does pieces itself, and each
// worker that has a core takes some of them. A worker without a core delays no one, unless it lost
// its core in the middle of a piece. There is no barrier within a call: where all pieces must end
// before other work begins, that work is another call of `parallel_for`.
#pragma once

#include <string.h>

#include "api/ece408.h"
#include "host/buffer.h"

namespace ece408 {
namespace {

// Calls work(begin, end, member) until each of `count` pieces has been in one run [begin, end). At
// most `threads` threads take part, each with its own number `thread` below that: with what is kept
// for a member, such as scratch memory, no two of them work at a time.
template <class Work>
void parallel_for_ranges(int threads, int64_t count, const Work& work) {
    const auto run = [](const void* all, int64_t begin, int64_t end, int thread) {
        (*static_cast<const Work*>(all))(begin, end, thread);
    };
    ece408_share(threads, count, run, &work);
}

// Calls work(piece, member) for each of `count` pieces, likewise.
template <class Work>
void parallel_for(int threads, int64_t count, const Work& work) {
    parallel_for_ranges(threads, count, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t chunk = begin; chunk < end; ++chunk) work(chunk, thread);
    });
}

// Memory for `count` zeros, made by all threads: for each one's scratch together a single one would
// take as long as the work itself.
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
