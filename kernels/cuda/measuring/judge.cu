// Not convolutions: they check and time other people's kernels on the GPU. This process draws the
// inputs and compares the results; the kernel under test runs in another process.

// The splitmix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014), by index of its sequence.
__device__ unsigned long long drawn(unsigned long long seed, unsigned place) {
    unsigned long long z = seed + (place + 1ull) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Uniformly distributed numbers in +-0.5.
extern "C" __global__ void draw(float *__restrict__ x, const unsigned long long *__restrict__ seed,
                                unsigned elements) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < elements;
         i += gridDim.x * blockDim.x) {
        x[i] = static_cast<float>(drawn(*seed, i) >> 40) / (1 << 24) - 0.5f;
    }
}

// Counts the elements of y that are off by more than `bound` billionths, or NaN. `count` must be 0
// before.
extern "C" __global__ void count_wrong(unsigned *__restrict__ count, const float *__restrict__ y,
                                       const float *__restrict__ expected, unsigned elements,
                                       int bound) {
    const float largest = 1e-9f * bound;
    unsigned mine = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < elements;
         i += gridDim.x * blockDim.x) {
        mine += !(fabsf(y[i] - expected[i]) <= largest);
    }
    if (mine > 0) atomicAdd(count, mine);
}

// Counts the words that differ between two arrays. `count` must be 0 before.
extern "C" __global__ void count_changed(unsigned *__restrict__ count,
                                         const unsigned *__restrict__ a,
                                         const unsigned *__restrict__ b, unsigned words) {
    unsigned mine = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words;
         i += gridDim.x * blockDim.x) {
        mine += a[i] != b[i];
    }
    if (mine > 0) atomicAdd(count, mine);
}
