// Not a convolution: keeps the GPU busy for some microseconds, for benchmarks, while the host
// gets ready what comes next, so that none of the host's own time is measured.
extern "C" __global__ void pause(int microseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < 1000ull * microseconds);
}
