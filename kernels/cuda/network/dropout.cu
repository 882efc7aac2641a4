// Dropout: y = x times 1 / KEPT with probability KEPT, else times 0. A thread has four elements.
//
// The numbers are Philox4x32-10's (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3",
// 2011), of the seed of a pass, the number of the layer and the element, so that the backward pass
// draws them again.
#ifndef KEPT
#define KEPT .5f
#endif

extern "C" __global__ void __launch_bounds__(256)
    dropout(float *__restrict__ y, const float *__restrict__ x, const unsigned *__restrict__ seed,
            int elements, int layer) {
    const unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (4 * i >= elements) return;
    unsigned n[4] = {i, unsigned(layer), 0, 0}, key[2] = {seed[0], seed[1]};
    for (int round = 0; round < 10; ++round) {
        const unsigned long long a = 0xD2511F53ull * n[0], b = 0xCD9E8D57ull * n[2];
        n[0] = unsigned(b >> 32) ^ n[1] ^ key[0];
        n[2] = unsigned(a >> 32) ^ n[3] ^ key[1];
        n[1] = unsigned(b), n[3] = unsigned(a);
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    for (int k = 0; k < 4 && 4 * i + k < elements; ++k) {
        const bool is_kept = float(n[k] >> 8) < KEPT * 16777216.f;
        y[4 * i + k] = x[4 * i + k] * (is_kept ? 1.f / KEPT : 0.f);
    }
}
