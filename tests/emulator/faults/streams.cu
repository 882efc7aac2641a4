// Work on several streams that depends on other streams.
#include "program.cuh"

// Streams that do or do not wait for the default one, and initialised arrays.
struct Streams {
    Arrays a;
    float* pinned;
    cudaStream_t s, t;
    cudaEvent_t event;

    explicit Streams(unsigned flags = cudaStreamNonBlocking) {
        cudaStreamCreateWithFlags(&s, flags);
        cudaStreamCreateWithFlags(&t, flags);
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
        cudaMallocHost(&pinned, 1024);
        memset(pinned, 0, 1024);
        cudaMemset(a.y, 0, Arrays::COUNT * sizeof(float));
        cudaDeviceSynchronize();
    }
    ~Streams() {
        cudaDeviceSynchronize();
        cudaFreeHost(pinned);
        cudaEventDestroy(event);
        cudaStreamDestroy(s);
        cudaStreamDestroy(t);
    }
};

__global__ void fills(float* y) { y[blockIdx.x * 64 + threadIdx.x] = threadIdx.x; }
__global__ void doubles(float* y, const float* x) {
    const int i = blockIdx.x * 64 + threadIdx.x;
    y[i] = 2 * x[i];
}

__global__ void reads_early(float* y, const float* x) {
    y[threadIdx.x] = x[threadIdx.x];  // lacks_an_event: race between streams // waits_before_the_work: race between streams // lost_order_by_a_destroyed_stream: race between streams
}
PROGRAM(lacks_an_event) {
    Streams all;
    fills<<<1, 64, 0, all.s>>>(all.a.x);
    reads_early<<<1, 64, 0, all.t>>>(all.a.y, all.a.x);
}
PROGRAM(waits_before_the_work) {
    Streams all;
    cudaEventRecord(all.event, all.s);
    fills<<<1, 64, 0, all.s>>>(all.a.x);
    cudaStreamWaitEvent(all.t, all.event, 0);
    reads_early<<<1, 64, 0, all.t>>>(all.a.y, all.a.x);
}
PROGRAM(lost_order_by_a_destroyed_stream) {
    Streams all;
    cudaStream_t own;
    cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
    fills<<<1, 64, 0, own>>>(all.a.x);
    // This stream does not wait.
    cudaStreamDestroy(own);
    reads_early<<<1, 64, 0, all.t>>>(all.a.y, all.a.x);
}

__global__ void writes_late(float* x) {
    x[threadIdx.x] = 1;  // overwrites_what_is_read: race between streams
}
PROGRAM(overwrites_what_is_read) {
    Streams all;
    doubles<<<1, 64, 0, all.s>>>(all.a.y, all.a.x);
    writes_late<<<1, 64, 0, all.t>>>(all.a.x);
}

// Two streams read, but it waits for the last one only.
__global__ void writes_too_soon(float* x) {
    x[threadIdx.x] = 1;  // waits_for_one_of_two_readers: race between streams
}
PROGRAM(waits_for_one_of_two_readers) {
    Streams all;
    doubles<<<1, 64, 0, all.s>>>(all.a.y, all.a.x);
    doubles<<<1, 64, 0, all.t>>>(all.a.y + 64, all.a.x);
    writes_too_soon<<<1, 64, 0, all.t>>>(all.a.x);
}

PROGRAM(copies_before_it_is_computed) {
    Streams all;
    fills<<<1, 64, 0, all.s>>>(all.a.x);
    cudaMemcpyAsync(all.pinned, all.a.x, 256, cudaMemcpyDeviceToHost, all.t);  // copies_before_it_is_computed: race between streams
}

__global__ void reads_a_copy(float* y, const float* x) {
    y[threadIdx.x] = x[threadIdx.x];  // reads_what_is_being_copied: race between streams
}
PROGRAM(reads_what_is_being_copied) {
    Streams all;
    cudaMemcpyAsync(all.a.x, all.pinned, 256, cudaMemcpyHostToDevice, all.s);
    reads_a_copy<<<1, 64, 0, all.t>>>(all.a.y, all.a.x);
}

// The host and a copy.
PROGRAM(reads_a_copy_on_the_host) {
    Streams all;
    float sum = 0;
    fills<<<1, 64, 0, all.s>>>(all.a.x);
    cudaMemcpyAsync(all.pinned, all.a.x, 256, cudaMemcpyDeviceToHost, all.s);
    cudaStreamSynchronize(all.t);
    for (int i = 0; i < 64; ++i) sum += all.pinned[i];  // reads_a_copy_on_the_host: race between streams
    cudaMemset(all.a.y, sum > 0, 4);
}
PROGRAM(overwrites_a_copy_on_the_host) {
    Streams all;
    for (int i = 0; i < 2; ++i) {
        for (int k = 0; k < 64; ++k) all.pinned[k] = i;  // overwrites_a_copy_on_the_host: race between streams
        cudaMemcpyAsync(all.a.x, all.pinned, 256, cudaMemcpyHostToDevice, all.s);
    }
}
PROGRAM(right_copies_on_the_host) {
    Streams all;
    for (int i = 0; i < 4; ++i) {
        // Its other half is being copied.
        for (int k = 0; k < 64; ++k) all.pinned[i % 2 * 64 + k] = i;
        cudaMemcpyAsync(all.a.x, all.pinned + i % 2 * 64, 256, cudaMemcpyHostToDevice, all.s);
        cudaEventSynchronize(all.event);
        cudaEventRecord(all.event, all.s);
    }
    cudaMemcpyAsync(all.pinned, all.a.x, 256, cudaMemcpyDeviceToHost, all.s);
    cudaEventRecord(all.event, all.s);
    cudaEventSynchronize(all.event);
    all.pinned[0] += 1;
}

// The default stream and one that does not wait for it.
__global__ void reads_zeros(float* y, const float* x) {
    y[threadIdx.x] = x[threadIdx.x];  // clears_on_the_default_stream: race between streams
}
PROGRAM(clears_on_the_default_stream) {
    Streams all;
    cudaMemset(all.a.x, 0, 256);
    reads_zeros<<<1, 64, 0, all.s>>>(all.a.y, all.a.x);
}

// Slices that overlap by a row.
__global__ void writes_a_slice(float* y, int n) {
    for (int i = threadIdx.x; i < n; i += 64) y[i] = i;  // slices_overlap: race between streams
}
PROGRAM(slices_overlap) {
    Streams all;
    writes_a_slice<<<1, 64, 0, all.s>>>(all.a.y, 129);
    writes_a_slice<<<1, 64, 0, all.t>>>(all.a.y + 128, 128);
}

PROGRAM(uses_a_destroyed_stream) {
    cudaStream_t s;
    cudaStreamCreate(&s);
    cudaStreamDestroy(s);
    cudaStreamSynchronize(s);  // uses_a_destroyed_stream: failed CUDA call
}

PROGRAM(right_events) {
    Streams all;
    for (int i = 0; i < 300; ++i) {
        fills<<<1, 64, 0, all.s>>>(all.a.x);
        cudaEventRecord(all.event, all.s);
        cudaStreamWaitEvent(all.t, all.event, 0);
        doubles<<<1, 64, 0, all.t>>>(all.a.y, all.a.x);
        cudaEventRecord(all.event, all.t);
        cudaStreamWaitEvent(all.s, all.event, 0);
    }
}

// Each stream copies and computes its slice of one array; all read the weights.
PROGRAM(right_slices) {
    Streams all;
    float pageable[256];
    for (int i = 0; i < 256; ++i) all.pinned[i] = i;
    for (int i = 0; i < 4; ++i) {
        const cudaStream_t own = i % 2 ? all.s : all.t;
        cudaMemcpyAsync(all.a.x + 64 * i, all.pinned + 64 * i, 256, cudaMemcpyHostToDevice, own);
        doubles<<<1, 64, 0, own>>>(all.a.y + 64 * i, all.a.x + 64 * i);
        cudaMemcpyAsync(pageable + 64 * i, all.a.y + 64 * i, 256, cudaMemcpyDeviceToHost, own);
    }
    cudaStreamSynchronize(all.s);
    cudaStreamSynchronize(all.t);
    fills<<<4, 64>>>(all.a.x);
}

// Streams that wait for the default one, as it waits for them.
PROGRAM(right_default_stream) {
    Streams all(cudaStreamDefault);
    cudaMemset(all.a.x, 0, 1024);
    doubles<<<2, 64, 0, all.s>>>(all.a.y, all.a.x);
    doubles<<<2, 64, 0, all.t>>>(all.a.y + 128, all.a.x + 128);
    doubles<<<4, 64>>>(all.a.x, all.a.y);
    doubles<<<4, 64, 0, all.s>>>(all.a.y, all.a.x);
    cudaEventRecord(all.event);
    cudaEventSynchronize(all.event);
    fills<<<4, 64, 0, all.t>>>(all.a.y);
}

// Readers on two streams, and a writer that waits for both.
PROGRAM(right_readers) {
    Streams all;
    cudaEvent_t other;
    cudaEventCreate(&other);
    doubles<<<1, 64, 0, all.s>>>(all.a.y, all.a.x);
    cudaEventRecord(all.event, all.s);
    doubles<<<1, 64, 0, all.t>>>(all.a.y + 64, all.a.x);
    cudaEventRecord(other, all.t);
    cudaStreamWaitEvent(0, all.event, 0);
    cudaStreamWaitEvent(0, other, 0);
    fills<<<1, 64>>>(all.a.x);
    cudaEventDestroy(other);
}

// A copy of pageable memory is complete when the call returns, as is one without "Async".
PROGRAM(right_copies) {
    Streams all;
    float host[64];
    fills<<<1, 64, 0, all.s>>>(all.a.x);
    cudaMemcpyAsync(host, all.a.x, 256, cudaMemcpyDeviceToHost, all.s);
    fills<<<1, 64, 0, all.t>>>(all.a.x);
    while (cudaStreamQuery(all.t)) {}
    cudaMemcpy(all.a.x, host, 256, cudaMemcpyHostToDevice);
    doubles<<<1, 64, 0, all.s>>>(all.a.y, all.a.x);
    cudaFree(nullptr);
}

// Both add atomically, and write the same.
__global__ void counts(int* sum, int* any) {
    atomicAdd(sum, 1);
    *any = 1;
}
PROGRAM(right_sums) {
    Streams all;
    counts<<<2, 64, 0, all.s>>>((int*)all.a.x, (int*)all.a.y);
    counts<<<2, 64, 0, all.t>>>((int*)all.a.x, (int*)all.a.y);
}
