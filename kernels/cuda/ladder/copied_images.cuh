// Whole images in shared memory, moved by Hopper's copy engine, and their convolution by Winograd's
// F(2, 3): what 16_copy_engine.cu and 19_more_registers.cu share. One warp moves, others compute.
#pragma once

#include "copy_engine.cuh"
#include "winograd.cuh"
#include "output.cuh"

#ifndef IMAGES
#define IMAGES 1  // that a block computes at a time, a unit
#endif
#ifndef BUFFERS
#define BUFFERS 1  // units whose images there is room for in shared memory
#endif
#ifndef GROUP
#define GROUP 1  // filters whose outputs leave together
#endif
#ifndef STAGES
#define STAGES 3  // groups whose outputs there is room for in shared memory
#endif
#ifndef WARPS
#define WARPS 1  // those that compute are a multiple of it, and those before them as many
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif

constexpr int kStrips = divide_up(kOutH, ROWS);
constexpr int kPairs = kOutW / 2;  // of columns
constexpr int kWindows = IMAGES * kStrips * kPairs;
constexpr int kWorkers = divide_up(kWindows, 32 * WARPS) * WARPS;  // warps that compute
constexpr int kThreads = 32 * (kWorkers + WARPS);
constexpr int kLine = 32;  // elements
constexpr int kRun = GROUP * kOutPlane;  // outputs of a group
constexpr int kRoom = (divide_up(kRun, kLine) + 1) * kLine;  // a run starts anywhere in a line
constexpr int kSets = FILTERS / GROUP;
// Filters that are one piece of code: while one begins, what the other waits for arrives.
constexpr int kAtOnce = GROUP % 2 == 0 ? 2 : 1;
// Pairs of a row that are given to whole halves of warps: their accesses meet in no bank.
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

// The block's shared memory. Its address comes from a register: the compiler would compute it again
// at each use.
__device__ __forceinline__ Shared &at(char *memory) {
    unsigned address = shared_address(memory);
    asm volatile("" : "+r"(address));
    return *(Shared *)__cvta_shared_to_generic(address);
}

// A block's share of the work, unit by unit, and of each unit the sets of filters from `set` to
// `end`. As long as there is a unit for each block, blocks take whole ones; of those left over each
// takes as many sets as the others, so that all blocks end together.
struct Share {
    unsigned units, whole, unit = blockIdx.x;
    int set = 0, end = kSets;

    __device__ __forceinline__ explicit Share(unsigned units)
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
    // The sets of the units left over that the blocks before this one have. (No more than 1024
    // filters' factors fit into shared memory, and no GPU holds more than 2000 blocks.)
    __device__ __forceinline__ unsigned bound(unsigned block) const {
        return (units - whole) * kSets * block / gridDim.x;
    }

    __device__ __forceinline__ void take_part(unsigned first) {
        unit = whole + first / kSets, set = first % kSets;
        end = min((unsigned)kSets, set + bound(blockIdx.x + 1) - first);
    }
};

// Where in its room a run of outputs begins that begins with this piece of 16 bytes of global
// memory: in the same piece of a line.
__device__ __forceinline__ int start(unsigned piece) { return piece % (kLine / 4) * 4; }

__device__ __forceinline__ unsigned piece(const float *y) { return (unsigned long long)y / 16; }

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

// What the warp that gives the engine its work does. It has little time: there are few cycles in
// which those that compute leave it an instruction.
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

    // The images of a unit into shared memory.
    __device__ __forceinline__ void bring(unsigned unit, int buffer) const {
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

    // The outputs of a set of filters out of shared memory.
    __device__ __forceinline__ void take(unsigned unit, int set) const {
        const int lane = threadIdx.x % 32, count = images(unit);
        float *to = y + unit * IMAGES * kOutImage + set * kRun;
        if (!aligned_for_copies(y)) {
#pragma unroll 1
            for (int image = 0; image < count; image++, to += kOutImage) {
                const float *from = shared.outputs[stage.number][image] + start(piece(to));
#pragma unroll 1
                for (int i = lane; i < kRun; i += 32) {
                    to[i] = from[i] + (ACCUMULATE ? to[i] : 0);
                }
            }
        } else if (elected()) {
#pragma unroll
            for (int image = 0; image < IMAGES; image++, to += kOutImage) {
                if (image >= count) break;
                copy_out(to, shared.outputs[stage.number][image] + start(piece(to)),
                         kRun * sizeof(float), ACCUMULATE);
            }
        }
        copies_begun();
    }

    __device__ __forceinline__ void move(unsigned units) {
        Share share(units), ahead = share;
#pragma unroll 1
        for (int buffer = 0; buffer < BUFFERS && ahead.more(); buffer++, ahead.advance()) {
            bring(ahead.unit, buffer);
        }
        for (Ring<BUFFERS> buffer; share.more(); share.advance(), buffer.advance()) {
            barrier_wait(&shared.images_read[buffer.number], buffer.parity);
            if (ahead.more()) {
                bring(ahead.unit, buffer.number);
                ahead.advance();
            }
#pragma unroll 1
            for (int set = share.set; set < share.end; set++) {
                barrier_wait(&shared.outputs_there[stage.number], stage.parity);
                take(share.unit, set);
                stage.advance();
                // An older stage is free as soon as the engine has read it.
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

// Which outputs are a thread's own.
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

// What a warp that computes does; `thread` counts from 0 in the first of them.
__device__ __forceinline__ void work(Shared &shared, int thread, float *y, const float *bias,
                                     unsigned units) {
    // Spare threads do again what the last window's does, and keep it.
    const Window window(min(thread, kWindows - 1));
    const bool spare = kWindows % (32 * WARPS) != 0 && thread >= kWindows;
    // The last strip is moved up to end with the image; the rows above `first` are not its own.
    const int first = window.strip * ROWS, i0 = min(first, kOutH - ROWS), j = 2 * window.pair;
    const float *pixels = shared.images[0] + window.image * kImage + i0 * WIDTH + j;
    float *place = shared.outputs[0][window.image] + i0 * kOutW + j;
    const unsigned image_piece = piece(y) + window.image * (kOutImage / 4);
    Ring<STAGES> stage;
    Ring<BUFFERS> buffer;
    for (Share share(units); share.more(); share.advance(), buffer.advance()) {
        barrier_wait(&shared.images_there[buffer.number], buffer.parity);
        float made[kWindowRows][kRowProducts];
        read_window(made, pixels + buffer.number * (IMAGES * kImage));
        barrier_arrive(&shared.images_read[buffer.number]);
        const unsigned unit_piece = image_piece + share.unit * (IMAGES * kOutImage / 4);
#pragma unroll 1
        for (int set = share.set; set < share.end; set++) {
            float *run = place + stage.number * (IMAGES * kRoom);
            run += start(unit_piece + set * (kRun / 4));
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
