// Bulk copies between global and shared memory by the copy engine (TMA) of Hopper and later GPUs,
// and the barriers in shared memory that it signals. Runs start at, and have, multiples of 16
// bytes. (PTX ISA: mbarrier, cp.async.bulk, cp.reduce.async.bulk.)
#pragma once

using Barrier = unsigned long long;

__device__ __forceinline__ unsigned shared_address(const void *at) {
    return (unsigned)__cvta_generic_to_shared(at);
}

__device__ __forceinline__ bool aligned_for_copies(const void *array) {
    return (unsigned long long)array % 16 == 0;
}

// By one thread; `barriers_ready` then makes the barriers visible to the others and to the engine.
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

// Arrives; the phase ends only after the engine has copied `bytes` bytes.
__device__ __forceinline__ void barrier_expect(Barrier *barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity is over; the phase before the first one has parity 1.
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

// The index of the current stage, and the parity of its barriers' phase.
template <int places>
struct Ring {
    int number = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++number == places) number = 0, parity ^= 1;
    }
};

// True in one thread of a warp, always the same. The compiler knows that it is one thread, and does
// not loop over the lanes for uniform operands.
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

// Copies to shared memory; the barrier counts the bytes.
__device__ __forceinline__ void copy_in(float *to, const float *from, unsigned bytes,
                                        Barrier *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// Makes a thread's writes to shared memory visible to the engine.
__device__ __forceinline__ void show_to_engine() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies out of shared memory; with `add`, adds to the floats at the destination.
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

// Closes a group of this thread's copies out of shared memory.
__device__ __forceinline__ void copies_begun() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the engine has read all but the newest groups of this thread.
template <int newest>
__device__ __forceinline__ void copies_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(newest) : "memory");
}
