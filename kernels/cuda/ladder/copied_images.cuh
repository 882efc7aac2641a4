// Shared by 16_copy_engine.cu and 19_more_registers.cu: whole images in shared memory, moved by
// Hopper's copy engine (TMA), and their convolution by Winograd's F(2, 3). One warp issues copies,
// the others compute.
#pragma once

#include "copy_engine.cuh"
#include "winograd.cuh"
#include "output.cuh"

#ifndef IMAGES
#define IMAGES 1  // that a block computes at a time, a unit
#define BUFFERS 1  // units whose images fit in shared memory
#define GROUP 1  // filters whose outputs are copied out together
#define STAGES 3  // groups whose outputs fit in shared memory
#define BLOCKS 1
#endif
#ifndef WARPS
#define WARPS 1  // the computing warps are a multiple of it; the first WARPS warps copy
#endif

constexpr int kStrips = divide_up(kOutH, ROWS);
constexpr int kPairs = kOutW / 2;  // of columns
constexpr int kWindows = IMAGES * kStrips * kPairs;
constexpr int kWorkers = divide_up(kWindows, 32 * WARPS) * WARPS;  // computing warps
constexpr int kThreads = 32 * (kWorkers + WARPS);
constexpr int kLine = 32;  // elements
constexpr int kRun = GROUP * kOutPlane;  // outputs of a group
constexpr int kRoom = (divide_up(kRun, kLine) + 1) * kLine;  // a run starts anywhere in a line
constexpr int kSets = FILTERS / GROUP;
// Filters that are computed together: their latencies overlap.
constexpr int kAtOnce = GROUP % 2 == 0 ? 2 : 1;
// Column pairs of a row that fill whole half-warps, whose accesses have no bank conflicts.
constexpr int kHalf = 16, kInHalves = kPairs / kHalf * kHalf, kRest = kPairs - kInHalves;

static_assert(kOutW % 2 == 0 && kPlane % 4 == 0 && kOutPlane % 4 == 0, "the engine's alignment");
static_assert(STAGES >= 3, "one is filled, one is complete, and one is emptied");
static_assert(FILTERS % GROUP == 0, "groups are alike");

struct Shared {
    alignas(128) float outputs[STAGES][IMAGES][kRoom];
    alignas(16) float images[BUFFERS][IMAGES * kImage];
    alignas(16) float factors[FILTERS][kFactors];
    Barrier images_there[BUFFERS], images_read[BUFFERS];
    Barrier outputs_there[STAGES], outputs_gone[STAGES];
};
#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == sizeof(Shared), "the host reckons with another size");
#endif

// The block's shared memory, addressed by a register: the compiler would recompute the address at
// each use.
__device__ __forceinline__ Shared &at(char *memory) {
    unsigned address = shared_address(memory);
    asm volatile("" : "+r"(address));
    return *(Shared *)__cvta_shared_to_generic(address);
}

// A block's work: its units, and of each unit the sets of filters from `set` to `end`. Blocks take
// whole units as long as there is one for each block. The sets of the remaining units are divided
// evenly, so that all blocks end together.
struct Schedule {
    unsigned units, whole, unit = blockIdx.x;
    int set = 0, end = kSets;

    __device__ __forceinline__ explicit Schedule(unsigned units)
        : units(units), whole(units / gridDim.x * gridDim.x) {
        if (whole == 0) take_part(bound(blockIdx.x));
    }

    __device__ __forceinline__ bool more() const { return set < end; }

    __device__ __forceinline__ void advance() {
        if (unit >= whole) {
            take_part((unit - whole) * kSets + end);
        } else if ((unit += gridDim.x) >= whole) {
            take_part(bound(blockIdx.x));
        }
    }

private:
    // The number of the remaining units' sets that belong to earlier blocks. (At most 1024 filters'
    // factors fit into shared memory, and no GPU holds more than 2000 blocks.)
    __device__ __forceinline__ unsigned bound(unsigned block) const {
        return (units - whole) * kSets * block / gridDim.x;
    }

    __device__ __forceinline__ void take_part(unsigned first) {
        unit = whole + first / kSets, set = first % kSets;
        end = min((unsigned)kSets, set + bound(blockIdx.x + 1) - first);
    }
};

// The offset in floats, in its buffer, of a run of outputs at this 16-byte chunk of global memory:
// the same offset in a line as in global memory.
__device__ __forceinline__ int start(unsigned chunk) { return chunk % (kLine / 4) * 4; }

__device__ __forceinline__ unsigned chunk(const float *y) { return (unsigned long long)y / 16; }

__device__ __forceinline__ void make_barriers(Shared &shared) {
    for (int buffer = 0; buffer < BUFFERS; buffer++) {
        barrier_init(&shared.images_there[buffer], 1);
        barrier_init(&shared.images_read[buffer], 32 * kWorkers);
    }
    for (int stage = 0; stage < STAGES; stage++) {
        barrier_init(&shared.outputs_there[stage], 32 * kWorkers);
        barrier_init(&shared.outputs_gone[stage], 32);
    }
    barriers_ready();
}

// The copying warp. It has few cycles: the computing warps leave it few issue slots.
struct Mover {
    Shared &shared;
    float *y;
    const float *x;
    int batch;
    int taken = 0;
    Ring<STAGES> stage, emptied;

    __device__ __forceinline__ int images(unsigned unit) const {
        return min((unsigned)IMAGES, batch - unit * IMAGES);
    }

    // Copies a unit's images to shared memory.
    __device__ __forceinline__ void copy_images(unsigned unit, int buffer) const {
        const int lane = threadIdx.x % 32, count = images(unit) * kImage;
        const float *from = x + unit * IMAGES * kImage;
        Barrier *there = &shared.images_there[buffer];
        if (!aligned_for_copies(x)) {
#pragma unroll 1
            for (int i = lane; i < count; i += 32) shared.images[buffer][i] = __ldg(from + i);
            __syncwarp();
            if (lane == 0) barrier_arrive(there);
        } else if (elected()) {
            barrier_expect(there, count * sizeof(float));
            copy_in(shared.images[buffer], from, count * sizeof(float), there);
        }
    }

    // Copies the outputs of a set of filters out of shared memory.
    __device__ __forceinline__ void copy_outputs(unsigned unit, int set) const {
        const int lane = threadIdx.x % 32, count = images(unit);
        float *to = y + unit * IMAGES * kOutImage + set * kRun;
        if (!aligned_for_copies(y)) {
#pragma unroll 1
            for (int image = 0; image < count; image++, to += kOutImage) {
                const float *from = shared.outputs[stage.number][image] + start(chunk(to));
#pragma unroll 1
                for (int i = lane; i < kRun; i += 32) {
                    to[i] = from[i] + (ACCUMULATE ? to[i] : 0);
                }
            }
        } else if (elected()) {
#pragma unroll
            for (int image = 0; image < IMAGES; image++, to += kOutImage) {
                if (image >= count) break;
                copy_out(to, shared.outputs[stage.number][image] + start(chunk(to)),
                         kRun * sizeof(float), ACCUMULATE);
            }
        }
        copies_begun();
    }

    __device__ __forceinline__ void move(unsigned units) {
        Schedule work_left(units), ahead = work_left;
#pragma unroll 1
        for (int buffer = 0; buffer < BUFFERS && ahead.more(); buffer++, ahead.advance()) {
            copy_images(ahead.unit, buffer);
        }
        for (Ring<BUFFERS> buffer; work_left.more(); work_left.advance(), buffer.advance()) {
            barrier_wait(&shared.images_read[buffer.number], buffer.parity);
            if (ahead.more()) {
                copy_images(ahead.unit, buffer.number);
                ahead.advance();
            }
#pragma unroll 1
            for (int set = work_left.set; set < work_left.end; set++) {
                barrier_wait(&shared.outputs_there[stage.number], stage.parity);
                copy_outputs(work_left.unit, set);
                stage.advance();
                // An older stage is free after the engine has read it.
                copies_read<STAGES - 3>();
                if (++taken > STAGES - 3) {
                    barrier_arrive(&shared.outputs_gone[emptied.number]);
                    emptied.advance();
                }
            }
        }
        copies_read<0>();
    }
};

// The outputs of one thread.
struct Window {
    int image, strip, pair;

    __device__ __forceinline__ explicit Window(int number) {
        constexpr int in_halves = IMAGES * kStrips * kInHalves;
        const bool in_half = number < in_halves;
        const int left = in_half ? number : number - in_halves;
        const int row = in_half ? kInHalves : kRest;
        pair = left % max(row, 1) + (in_half ? 0 : kInHalves);
        strip = left / max(row, 1) % kStrips, image = left / max(row, 1) / kStrips;
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

// A computing warp; `thread` counts from 0 in the first one.
__device__ __forceinline__ void work(Shared &shared, int thread, float *y, const float *bias,
                                     unsigned units) {
    // Spare threads recompute the last window, and do not store it.
    const Window window(min(thread, kWindows - 1));
    const bool spare = kWindows % (32 * WARPS) != 0 && thread >= kWindows;
    // The last strip moves up to end with the image; its rows above `first` belong to the previous
    // one.
    const int first = window.strip * ROWS, i0 = min(first, kOutH - ROWS), j = 2 * window.pair;
    const float *pixels = shared.images[0] + window.image * kImage + i0 * WIDTH + j;
    float *place = shared.outputs[0][window.image] + i0 * kOutW + j;
    const unsigned image_chunk = chunk(y) + window.image * (kOutImage / 4);
    Ring<STAGES> stage;
    Ring<BUFFERS> buffer;
    for (Schedule work_left(units); work_left.more(); work_left.advance(), buffer.advance()) {
        barrier_wait(&shared.images_there[buffer.number], buffer.parity);
        float made[kWindowRows][kRowProducts];
        read_window(made, pixels + buffer.number * (IMAGES * kImage));
        barrier_arrive(&shared.images_read[buffer.number]);
        const unsigned unit_chunk = image_chunk + work_left.unit * (IMAGES * kOutImage / 4);
#pragma unroll 1
        for (int set = work_left.set; set < work_left.end; set++) {
            float *run = place + stage.number * (IMAGES * kRoom);
            run += start(unit_chunk + set * (kRun / 4));
            // Wait on both barriers: the sanitizers cannot see the copy engine's reads.
            Barrier *gone = &shared.outputs_gone[stage.number];
            Barrier *there = &shared.outputs_there[stage.number];
            const unsigned before = stage.parity ^ 1;
            const bool is_free = barrier_passed(gone, before) & barrier_passed(there, before);
#pragma unroll kAtOnce
            for (int within = 0; within < GROUP; within++) {
                const int filter = set * GROUP + within;
                float2 outputs[ROWS];
                convolve_pairs(outputs, made, shared.factors[filter]);
                if (within == 0 && !is_free) {
                    barrier_wait(gone, before);
                    barrier_wait(there, before);
                }
                if (spare) continue;
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    if (kOutH % ROWS != 0 && i0 + r < first) continue;
                    float2 pair = outputs[r];
                    if (BIAS) pair = make_float2(pair.x + bias[filter], pair.y + bias[filter]);
                    ACTIVATE(pair.x);
                    ACTIVATE(pair.y);
                    *(float2 *)(run + within * kOutPlane + r * kOutW) = pair;
                }
            }
            show_to_engine();
            barrier_arrive(there);
            stage.advance();
        }
    }
}
