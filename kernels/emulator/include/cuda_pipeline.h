// Asynchronous copies to shared memory: the emulator copies at once, and reports accesses before
// the wait.
#pragma once

#include "cuda_runtime.h"

// Copies 4, 8 or 16 bytes, the last `zeros` of which become zero without a read.
inline void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes, size_t zeros = 0) {
    unsigned* to = static_cast<unsigned*>(shared);
    const unsigned char* from = static_cast<const unsigned char*>(global);
    const size_t read = bytes - zeros;
    for (size_t i = 0; i < bytes; i += 4) {
        unsigned word = 0;
        if (i + 4 <= read) {
            word = *reinterpret_cast<const unsigned*>(from + i);
        } else {
            for (size_t j = i; j < read; j++) word |= static_cast<unsigned>(from[j]) << 8 * (j - i);
        }
        to[i / 4] = word;
    }
    ece408_emulator::begin_copy(shared, bytes);
}

inline void __pipeline_commit() { ece408_emulator::commit_copies(); }
inline void __pipeline_wait_prior(size_t but) { ece408_emulator::wait_for_copies(but); }
