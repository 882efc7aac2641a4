// Threads that share the work of a call, on busy machines as well: team.cpp says which.
//
// A call's work is so many pieces in any order. The caller does them itself, one after the other,
// and whatever worker has a core takes some off it; who has none holds nobody up, unless it was
// put off in the middle of a piece. Where all must have ended before something else begins, that is
// another call of `share`.
#pragma once

#include "ece408.h"

namespace ece408 {
namespace {

// Calls work(begin, end, member) until each of `count` pieces has been in one run [begin, end). At
// most `threads` threads take part, each with its own number `member` below that: with what is kept
// for a member, such as scratch memory, no two of them work at a time.
template <class Work>
void share_runs(int threads, int64_t count, const Work& work) {
    const auto run = [](const void* all, int64_t begin, int64_t end, int member) {
        (*static_cast<const Work*>(all))(begin, end, member);
    };
    ece408_share(threads, count, run, &work);
}

// Calls work(piece, member) for each of `count` pieces, likewise.
template <class Work>
void share(int threads, int64_t count, const Work& work) {
    share_runs(threads, count, [&](int64_t begin, int64_t end, int member) {
        for (int64_t piece = begin; piece < end; ++piece) work(piece, member);
    });
}

}  // namespace
}  // namespace ece408
