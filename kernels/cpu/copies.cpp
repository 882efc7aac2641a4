// Host memory copied by all threads at once, for arrays on their way to a GPU and back: one thread
// alone moves a fraction of what the bus does. Stores go past the caches, since neither the bus nor
// the caller reads the copy soon.
#include <string.h>

#include "ece408.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ece408 {
namespace {

// A cache line, which a thread's part begins and ends with.
constexpr int64_t kLine = 64;
// Less is not worth another thread.
constexpr int64_t kLeastPart = 64 << 10;

int64_t to_line(const char* address) {
    return -reinterpret_cast<intptr_t>(address) & (kLine - 1);
}

void copy_part(char* to, const char* from, int64_t nbytes) {
#if defined(__SSE2__)
    int64_t done = to_line(to) < nbytes ? to_line(to) : nbytes;
    memcpy(to, from, done);
    for (; done + kLine <= nbytes; done += kLine) {
        __m128i line[4];
        for (int i = 0; i < 4; ++i)
            line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done) + i);
        for (int i = 0; i < 4; ++i)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + done) + i, line[i]);
    }
    memcpy(to + done, from + done, nbytes - done);
    _mm_sfence();
#else
    memcpy(to, from, nbytes);
#endif
}

}  // namespace
}  // namespace ece408

void ece408_copy(void* to, const void* from, int64_t nbytes, int threads) {
    using namespace ece408;
    char* target = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
    const int64_t most = nbytes / kLeastPart + 1;
    const int parts = static_cast<int>(threads < most ? threads : most);
#pragma omp parallel for schedule(static) num_threads(parts)
    for (int part = 0; part < parts; ++part) {
        const int64_t begin = nbytes * part / parts / kLine * kLine;
        const int64_t end = part + 1 == parts ? nbytes : nbytes * (part + 1) / parts / kLine * kLine;
        copy_part(target + begin, source + begin, end - begin);
    }
}
