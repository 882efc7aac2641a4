// Not a convolution: keeps the GPU busy for some microseconds, for benchmarks, while the host
// queues the next launches, so that host time is not measured.
extern "C" __global__ void pause(int microseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < 1000ull * microseconds);
}
