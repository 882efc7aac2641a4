// The engine of Hopper and later GPUs that copies whole runs of bytes between global and shared
// memory on its own, and the barriers in shared memory that it reports to. Runs start at, and have,
// multiples of 16 bytes. (PTX ISA: mbarrier, cp.async.bulk, cp.reduce.async.bulk.)
#pragma once

using Barrier = unsigned long long;

__device__ __forceinline__ unsigned shared_address(const void *at) {
    return (unsigned)__cvta_generic_to_shared(at);
}

__device__ __forceinline__ bool aligned_for_copies(const void *array) {
    return (unsigned long long)array % 16 == 0;
}

// By one thread, and to be made known to the others and to the engine by `barriers_ready`.
__device__ __forceinline__ void barrier_init(Barrier *barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrive, and let the phase end only when the engine has brought `bytes` bytes.
__device__ __forceinline__ void barrier_expect(Barrier *barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Wait until the phase of this parity is over: that before the first counts as one of parity 1.
__device__ __forceinline__ void barrier_wait(Barrier *barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "wait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra wait;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Whether the phase of this parity is over, without waiting for it.
__device__ __forceinline__ bool barrier_passed(Barrier *barrier, unsigned parity) {
    unsigned passed;
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}\n"
        : "=r"(passed)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return passed;
}

// Which of several places is in use, and the parity of the phase that its barriers are in.
template <int places>
struct Ring {
    int number = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++number == places) number = 0, parity ^= 1;
    }
};

// True in one thread of a warp, always the same, of whom the compiler knows that it is alone: what
// the engine is given need not be tried for every thread.
__device__ __forceinline__ bool elected() {
    unsigned one;
    asm volatile(
        "{\n"
        ".reg .pred this;\n"
        "elect.sync _|this, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, this;\n"
        "}\n"
        : "=r"(one));
    return one;
}

// Bring bytes to shared memory; the barrier hears of them.
__device__ __forceinline__ void copy_in(float *to, const float *from, unsigned bytes,
                                        Barrier *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// What a thread has written to shared memory, the engine sees from here on.
__device__ __forceinline__ void show_to_engine() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Take bytes out of shared memory, and with `add` add them to the floats that are there.
__device__ __forceinline__ void copy_out(float *to, const float *from, unsigned bytes, bool add) {
    if (add) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::
                         "l"(to),
                     "r"(shared_address(from)), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(from)), "r"(bytes)
                     : "memory");
    }
}

// What this thread has begun to take out is one group.
__device__ __forceinline__ void copies_begun() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Wait until the engine has read all but the newest groups of this thread out of shared memory.
template <int newest>
__device__ __forceinline__ void copies_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(newest) : "memory");
}
