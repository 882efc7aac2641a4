// 16. 15 with images and outputs moved by Hopper's copy engine.
//
// Changed against 15_fewer_products.cu: what 15 waits for is the way to the L2 cache: rows that are
// no multiples of 32 bytes are written in more pieces than they have sectors. Here a block owns
// IMAGES whole images at a time, which the engine that copies whole runs of memory on its own
// brings to shared memory while the block computes those before. The outputs of a GROUP of filters,
// which lie in one row in global memory, are put together in shared memory and taken from there by
// the engine while the next filters are computed. It reads lines of 128 bytes: outputs start as far
// behind a line in shared memory as they do in global memory. A warp of its own gives the engine
// its work; it and those that compute tell each other by barriers in shared memory what is there,
// and never all wait for one another.
//
// Measured: fa19_1 0.66 ms (1.60x); batch 10000, NVIDIA H200.
#ifndef CHANNELS  // by default the first convolution of term 2019fa
#define CHANNELS 1
#define HEIGHT 70
#define WIDTH 70
#define FILTERS 12
#endif
#include "copy_engine.cuh"
#include "fewer_products.cuh"
#include "output.cuh"

#ifndef IMAGES
#define IMAGES 1
#endif
#ifndef GROUP
#define GROUP 1  // filters whose outputs leave together
#endif
#ifndef STAGES
#define STAGES 3  // groups whose outputs there is room for in shared memory
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

constexpr int kStrips = divide_up(kOutH, ROWS);
constexpr int kPairs = kOutW / 2;  // of columns
constexpr int kWindows = IMAGES * kStrips * kPairs;
constexpr int kWorkers = divide_up(kWindows, 32);  // warps that compute
constexpr int kThreads = 32 * (kWorkers + 1);
constexpr int kLine = 32;  // elements
constexpr int kRun = GROUP * kOutPlane;  // outputs of a group
constexpr int kRoom = (divide_up(kRun, kLine) + 1) * kLine;  // a run starts anywhere in a line

static_assert(kOutW % 2 == 0 && kPlane % 4 == 0 && kOutPlane % 4 == 0, "the engine's alignment");
static_assert(STAGES >= 3, "one is filled, one is complete, and one is emptied");
static_assert(FILTERS % GROUP == 0, "groups are alike");
static_assert(IMAGES <= 32, "a lane of the moving warp takes out the outputs of one image");

struct Shared {
    alignas(128) float outputs[STAGES][IMAGES][kRoom];
    alignas(16) float images[IMAGES * kImage];
    alignas(16) float factors[FILTERS][kFactors];
    Barrier images_there, images_read, outputs_there[STAGES], outputs_gone[STAGES];
};

// Which stage is in use, and the parity of the phase that its barriers are in.
struct Stage {
    int number = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void advance() {
        if (++number == STAGES) number = 0, parity ^= 1;
    }
};

// Where in its room the run of outputs begins that goes to `y`: in the same 16 bytes of a line.
__device__ __forceinline__ int start(const float *y) {
    return (unsigned long long)y / 16 % (kLine / 4) * 4;
}

// What the warp that gives the engine its work does, one group of filters of a unit after the
// other; `unit` counts IMAGES images at a time.
struct Mover {
    Shared &shared;
    float *y;
    const float *x;
    int batch;
    unsigned units, unit = blockIdx.x, parity = 0;
    int filter = 0, taken = 0;
    Stage stage, emptied;

    __device__ __forceinline__ bool more() const { return unit < units; }

    __device__ __forceinline__ int images(unsigned of) const {
        return min((unsigned)IMAGES, batch - of * IMAGES);
    }

    // The images of a unit into shared memory.
    __device__ __forceinline__ void bring(unsigned next) const {
        const int lane = threadIdx.x % 32, count = images(next) * kImage;
        const float *from = x + next * IMAGES * kImage;
        if (!aligned_for_copies(x)) {
#pragma unroll 1
            for (int i = lane; i < count; i += 32) shared.images[i] = __ldg(from + i);
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.images_there);
        } else if (lane == 0) {
            barrier_expect(&shared.images_there, count * sizeof(float));
            copy_in(shared.images, from, count * sizeof(float), &shared.images_there);
        }
    }

    // The outputs of a group out of shared memory.
    __device__ __forceinline__ void take() const {
        const int lane = threadIdx.x % 32;
        float *to = y + unit * IMAGES * kOutImage + filter * kOutPlane;
        if (!aligned_for_copies(y)) {
#pragma unroll 1
            for (int image = 0; image < images(unit); image++, to += kOutImage) {
                const float *from = shared.outputs[stage.number][image] + start(to);
#pragma unroll 1
                for (int i = lane; i < kRun; i += 32) {
                    to[i] = from[i] + (ACCUMULATE ? to[i] : 0);
                }
            }
        } else if (lane < images(unit)) {
            to += lane * kOutImage;
            copy_out(to, shared.outputs[stage.number][lane] + start(to), kRun * sizeof(float),
                     ACCUMULATE);
        }
        copies_begun();
    }

    __device__ __forceinline__ void move() {
        if (filter == 0) {
            barrier_wait(&shared.images_read, parity);
            if (unit + gridDim.x < units) bring(unit + gridDim.x);
            parity ^= 1;
        }
        barrier_wait(&shared.outputs_there[stage.number], stage.parity);
        take();
        stage.advance();
        // An older stage is free as soon as the engine has read it.
        copies_read<STAGES - 3>();
        if (++taken > STAGES - 3) {
            barrier_arrive(&shared.outputs_gone[emptied.number]);
            emptied.advance();
        }
        filter += GROUP;
        if (filter == FILTERS) filter = 0, unit += gridDim.x;
    }
};

// The pixels under a thread's outputs, transformed.
__device__ __forceinline__ void read_window(float (&made)[kWindowRows][kRowProducts],
                                            const float *from) {
#pragma unroll
    for (int r = 0; r < kWindowRows; r++) {
        float pixels[kWindow];
#pragma unroll
        for (int q = 0; q < kWindow; q += 2) {
            const float2 pair = *(const float2 *)(from + r * WIDTH + q);
            pixels[q] = pair.x;
            pixels[q + 1] = pair.y;
        }
        transform(made[r], pixels);
    }
}

// A warp that computes.
__device__ __forceinline__ void work(Shared &shared, float *y, const float *bias, unsigned units) {
    // The last warp's spare threads do again what the last window's does, and keep it.
    const int window = min((int)threadIdx.x, kWindows - 1);
    const int j = window % kPairs * 2, strip = window / kPairs % kStrips;
    const int image = window / kPairs / kStrips;
    // The last strip is moved up to end with the image; the rows above `first` are not its own.
    const int first = strip * ROWS, i0 = min(first, kOutH - ROWS);
    y += image * kOutImage;
    Stage stage;
    unsigned parity = 0;
    for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x, parity ^= 1) {
        barrier_wait(&shared.images_there, parity);
        float made[kWindowRows][kRowProducts];
        read_window(made, shared.images + image * kImage + i0 * WIDTH + j);
        barrier_arrive(&shared.images_read);
#pragma unroll 1
        for (int filter = 0; filter < FILTERS; filter++) {
            float2 outputs[ROWS];
            convolve_pairs(outputs, made, shared.factors[filter]);
            const int within = filter % GROUP;
            if (within == 0) {
                barrier_wait(&shared.outputs_gone[stage.number], stage.parity ^ 1);
                // They were there before they were gone; tools that do not know the engine see it.
                barrier_wait(&shared.outputs_there[stage.number], stage.parity ^ 1);
            }
            float *to = shared.outputs[stage.number][image] + within * kOutPlane + i0 * kOutW + j +
                start(y + unit * IMAGES * kOutImage + (filter - within) * kOutPlane);
            if (threadIdx.x < kWindows) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    if (kOutH % ROWS != 0 && i0 + r < first) continue;
                    float2 pair = outputs[r];
                    if (BIAS) pair = make_float2(pair.x + bias[filter], pair.y + bias[filter]);
                    *(float2 *)(to + r * kOutW) = pair;
                }
            }
            if (within < GROUP - 1) continue;
            show_to_engine();
            barrier_arrive(&shared.outputs_there[stage.number]);
            stage.advance();
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    extern __shared__ __align__(128) char memory[];
    Shared &shared = *(Shared *)memory;
    if (threadIdx.x == 0) {
        barrier_init(&shared.images_there, 1);
        barrier_init(&shared.images_read, 32 * kWorkers);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&shared.outputs_there[stage], 32 * kWorkers);
            barrier_init(&shared.outputs_gone[stage], 32);
        }
        barriers_ready();
    }
    load_factors(shared.factors, w, kThreads);
    __syncthreads();
    const unsigned units = divide_up(batch, IMAGES);
    if (threadIdx.x / 32 < kWorkers) {
        work(shared, y, bias, units);
    } else {
        Mover mover{shared, y, x, batch, units};
        if (mover.more()) mover.bring(mover.unit);
        while (mover.more()) mover.move();
        copies_read<0>();
    }
}
