// 14. Hopper's asynchronous tensor cores (wgmma), still three TF32 products for one.
//
// Changed against 11_3xtf32.cu: four warps issue one multiplication of 64 pixels by all filters of
// the block; pixels come from registers as before, both parts of the weights from shared memory, in
// the blocks of 8 filters x 16 bytes that the unit reads. It works on its own: while it multiplies
// one run of steps, the warps gather the next one's pixels and add the sums of the one before to
// theirs, so that there are two sets of accumulators and of pixels.
//
// Measured: fa19_2 1.45 ms (1.37x); batch 10000, NVIDIA H200.
#include <stdint.h>

#include "output.cuh"
#include "shape.cuh"

#ifndef QUAD
#define QUAD 4  // channels of a quad of k values, 4 or 2; with 2, a quad has two taps of each
#endif
#ifndef WARPS
#define WARPS 8  // a multiple of 4
#endif
#ifndef FILTER_TILES
#define FILTER_TILES 3  // tiles of 8 filters that a block works on, at most 4
#endif
#ifndef STRIP_ROWS
#define STRIP_ROWS 29  // output rows whose input is in shared memory
#endif
#ifndef BUFFERS
#define BUFFERS 1  // 2: the next strip is loaded meanwhile
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 2
#endif
#ifndef PROMOTE
#define PROMOTE 4  // steps in a run, about
#endif

constexpr int kThreads = WARPS * 32;
constexpr int kQuadTaps = 4 / QUAD;
constexpr int kGroups = divide_up(CHANNELS, QUAD);
constexpr int kQuads = divide_up(kTaps, kQuadTaps);  // of a group of channels
constexpr int kSteps = divide_up(kQuads, 2);         // of 8 k values each
// Runs of steps of a group of channels, and the most steps in one.
constexpr int kRuns = divide_up(kSteps, PROMOTE);
constexpr int kRunSteps = divide_up(kSteps, kRuns);
constexpr int kSums = FILTER_TILES * 4;  // of a thread
constexpr int kStrips = divide_up(kOutH, STRIP_ROWS);
constexpr int kStripPixels = (STRIP_ROWS + KERNEL_H - 1) * WIDTH;
// Planes lie 8 (with two taps in a quad: 16) banks apart, so that the lanes of a warp, 8
// neighbouring pixels by 4 k values, read from 32 different banks.
constexpr int kBanks = QUAD == 4 ? 8 : 16;
constexpr int kPitch = kStripPixels + (kBanks + 32 - kStripPixels % 32) % 32;
constexpr int kBuffer = kGroups * QUAD * kPitch;

// Of a step: the large and the small part of the weights of two quads of k for each filter.
struct Weights {
    float parts[2][2][FILTER_TILES * 8][4];
};

struct Shared {
    Weights weights[kGroups][kSteps];
    float strips[BUFFERS][kBuffer];
};

// Where in a strip tap number `tap`, or the last one, lies.
__host__ __device__ constexpr int tap_offset(int tap) {
    return tap < kTaps ? tap / KERNEL_W * WIDTH + tap % KERNEL_W : tap_offset(kTaps - 1);
}

__device__ __forceinline__ float large_part(float v) {
    return __uint_as_float(__float_as_uint(v) & 0xffffe000u);
}

// What the unit is told about one part of a step's weights: where they are, and how far apart
// blocks of 8 filters x 16 bytes lie along k and along the filters, all in units of 16 bytes.
__device__ __forceinline__ uint64_t describe(const float *weights) {
    const uint64_t address = __cvta_generic_to_shared(weights);
    return address >> 4 | uint64_t(FILTER_TILES * 8) << 16 | uint64_t(8) << 32;
}

// d = a * b, plus d with `add`: 64 pixels x 8 k values by 8 x 8, 16, 24 or 32 filters.
__device__ __forceinline__ void multiply(float (&d)[4], const float (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, %8, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply(float (&d)[8], const float (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply(float (&d)[12], const float (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, %16, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply(float (&d)[16], const float (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "l"(b), "r"(add));
}

// Keeps the compiler from touching registers that the unit works on.
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

// Weights in two parts, and then visible to the tensor cores, which read memory by another way.
__device__ void load_weights(Shared &shared, const float *w, int filter0) {
    for (int i = threadIdx.x; i < kGroups * kSteps * FILTER_TILES * 64; i += kThreads) {
        const int k = i % 8, n = i / 8 % (FILTER_TILES * 8), step = i / 64 / FILTER_TILES % kSteps;
        const int group = i / 64 / FILTER_TILES / kSteps;
        const int c = group * QUAD + k % QUAD, filter = filter0 + n;
        const int tap = (step * 2 + k / 4) * kQuadTaps + k % 4 / QUAD;
        const bool inside = filter < FILTERS && c < CHANNELS && tap < kTaps;
        const float v = inside ? w[(filter * CHANNELS + c) * kTaps + tap] : 0;
        Weights &to = shared.weights[group][step];
        to.parts[0][k / 4][n][k % 4] = v;
        to.parts[1][k / 4][n][k % 4] = v - large_part(v);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Start to copy a strip's input; the channels that fill up the last group stay zero.
__device__ void fetch(float *strip, const float *x, unsigned unit) {
    const int row0 = unit % kStrips * STRIP_ROWS;
    const int pixels = min(kStripPixels, (HEIGHT - row0) * WIDTH);
    const float *from = x + unit / kStrips * kImage + row0 * WIDTH;
    for (int c = 0; c < CHANNELS; c++) {
        for (int i = threadIdx.x; i < pixels; i += kThreads) {
            const uint32_t to = __cvta_generic_to_shared(strip + c * kPitch + i);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to),
                         "l"(from + c * kPlane + i));
        }
    }
    asm volatile("cp.async.commit_group;");
}

// Both parts of a run's pixels.
struct Pixels {
    float large[kRunSteps][4], small[kRunSteps][4];
};

__device__ __forceinline__ void gather(Pixels &pixels, const float *const (&window)[2], int part,
                                       int first, int count) {
#pragma unroll
    for (int i = 0; i < kRunSteps; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (i >= count) break;
            const int tap = ((first + i) * 2 + j / 2) * kQuadTaps;
            const int offset = tap_offset(tap);
            const int next = kQuadTaps == 2 ? tap_offset(tap + 1) - offset : 0;
            const float v = window[j % 2][offset + part * next];
            pixels.large[i][j] = v;
            pixels.small[i][j] = v - large_part(v);
        }
    }
}

// The sums of a tile of 64 pixels from `pixel0` on, for all channels, taps and filters.
__device__ __forceinline__ void compute(float (&sum)[kSums], const Shared &shared,
                                        const float *strip, int pixel0, int last_pixel) {
    const int lane = threadIdx.x % 32, part = lane % 4 / QUAD;
    const float *window[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int pixel = min(pixel0 + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * j, last_pixel);
        window[j] = strip + pixel / kOutW * WIDTH + pixel % kOutW + lane % QUAD * kPitch;
    }
#pragma unroll 1
    for (int group = 0; group < kGroups; group++) {
        const uint64_t weights = describe(&shared.weights[group][0].parts[0][0][0][0]);
        float running[2][kSums] = {};
        Pixels pixels[2];
#pragma unroll
        for (int run = 0; run < kRuns; run++) {
            const int first = run * kSteps / kRuns, end = (run + 1) * kSteps / kRuns;
            gather(pixels[run % 2], window, part, first, end - first);
            hold(running[run % 2]);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < kRunSteps; i++) {
                if (first + i >= end) break;
                const uint64_t large = weights + (first + i) * (sizeof(Weights) / 16);
                const uint64_t small = large + sizeof(Weights) / 32;
                multiply(running[run % 2], pixels[run % 2].small[i], large, i > 0);
                multiply(running[run % 2], pixels[run % 2].large[i], small, 1);
                multiply(running[run % 2], pixels[run % 2].large[i], large, 1);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (run == 0) continue;
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            hold(running[1 - run % 2]);
#pragma unroll
            for (int i = 0; i < kSums; i++) sum[i] += running[1 - run % 2][i];
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        hold(running[(kRuns - 1) % 2]);
#pragma unroll
        for (int i = 0; i < kSums; i++) sum[i] += running[(kRuns - 1) % 2][i];
        window[0] += QUAD * kPitch;
        window[1] += QUAD * kPitch;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS)
    convolve(float *y, const float *x, const float *w, const float *bias, int batch) {
    extern __shared__ __align__(16) char memory[];
    Shared &shared = *(Shared *)memory;
    const int filter0 = blockIdx.y * FILTER_TILES * 8;
    const unsigned units = batch * kStrips;  // an image's strips are the units of work
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    load_weights(shared, w, filter0);
    for (int buffer = 0; buffer < BUFFERS; buffer++) {
        for (int i = CHANNELS * kPitch + threadIdx.x; i < kBuffer; i += kThreads) {
            shared.strips[buffer][i] = 0;
        }
    }
    if (BUFFERS == 2 && blockIdx.x < units) fetch(shared.strips[0], x, blockIdx.x);
    int buffer = 0;
    for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
        if (BUFFERS == 1) {
            __syncthreads();
            fetch(shared.strips[0], x, unit);
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        const float *strip = shared.strips[buffer];
        if (BUFFERS == 2) {
            buffer = 1 - buffer;
            if (unit + gridDim.x < units) fetch(shared.strips[buffer], x, unit + gridDim.x);
        }
        const int row0 = unit % kStrips * STRIP_ROWS;
        const int pixels = min(STRIP_ROWS, kOutH - row0) * kOutW;
        float *out = y + unit / kStrips * kOutImage + row0 * kOutW;
        for (int pixel0 = warp / 4 * 64; pixel0 < pixels; pixel0 += WARPS * 16) {
            float sum[kSums] = {};
            compute(sum, shared, strip, pixel0, pixels - 1);
#pragma unroll
            for (int i = 0; i < kSums; i++) {
                const int pixel = pixel0 + warp % 4 * 16 + lane / 4 + i % 4 / 2 * 8;
                const int filter = filter0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (pixel < pixels && filter < FILTERS) {
                    store(out + filter * kOutPlane + pixel, sum[i], bias, filter);
                }
            }
        }
    }
}
