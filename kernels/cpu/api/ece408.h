/* The C interface of libece408_cpu.so: with network/program.h, everything the library exports.
 *
 * Arrays are contiguous, NCHW, of the type in the function's name:
 *   x, dx      (batch, channels, height, width)
 *   w, dw      (filters, channels / groups, kernel_h, kernel_w)
 *   bias,dbias (filters)
 *   y, dy      (batch, filters, out_height, out_width)
 * Types are f32, f64 and f16, the bits of IEEE half precision, which the fast kernels compute with in
 * float, from copies of the arrays. They need the alignment of their element only, and must not overlap. Nothing outside them is
 * read or written. With `accumulate` nonzero the result is added to the output's old contents;
 * otherwise these are not read. `threads` is the most threads used, including the caller's; small
 * problems use fewer, and every result is the same to the last bit for any number of threads.
 * Functions are thread-safe. Between calls only the thread pool stays, asleep.
 */
#ifndef ECE408_H
#define ECE408_H

#include <stdint.h>

#define ECE408_EXPORT __attribute__((visibility("default")))

/* Changes with every incompatible change of this header. */
#define ECE408_ABI_VERSION 14

#ifdef __cplusplus
extern "C" {
#endif

/* A two-dimensional cross-correlation; ece408_op/problem.py has the formula. */
typedef struct ece408_problem {
    int64_t batch, channels, height, width, filters;
    int64_t kernel_h, kernel_w;
    int64_t stride_h, stride_w;
    int64_t pad_h, pad_w;
    int64_t dilate_h, dilate_w;
    int64_t groups;
} ece408_problem;

/* Returned by every function that computes. */
enum ece408_status {
    ECE408_OK = 0,
    ECE408_INVALID = 1,     /* no such convolution, a null array, or threads below 1 */
    ECE408_UNSUPPORTED = 2, /* the function cannot do this problem, or not on this CPU */
    ECE408_NO_MEMORY = 3    /* scratch memory could not be allocated */
};

/* Instruction sets the fast kernels are compiled for. */
enum ece408_isa { ECE408_BASELINE = 0, ECE408_AVX2 = 1, ECE408_AVX512 = 2 };

ECE408_EXPORT int ece408_abi_version(void);

/* 1 if this library and this CPU both have the instruction set, else 0. */
ECE408_EXPORT int ece408_isa_supported(int isa);

/* Directions of a convolution. */
enum ece408_direction {
    ECE408_FORWARD = 0,
    ECE408_BACKWARD_DATA = 1,
    ECE408_BACKWARD_WEIGHT = 2
};

/* Kernels are numbered from 0 on; ECE408_CHOSEN stands for the one that ece408_choose returns. */
enum { ECE408_CHOSEN = -1 };

/* A kernel's name, or null if there is no kernel of this number. */
ECE408_EXPORT const char* ece408_kernel_name(int kernel);

/* The number of the kernel that is expected to be the fastest for a problem, from the layer's sizes
 * alone. `element_bytes`: 2, 4 or 8. `strict`: for the functions of that name, on floats. `kept`: the
 * forward pass gets packed weights that are kept from call to call. Returns ECE408_CHOSEN for an
 * invalid problem. Takes less than a microsecond. */
ECE408_EXPORT int ece408_choose(const ece408_problem* problem, int direction, int element_bytes,
                                int isa, int strict, int kept);

/* Any convolution, in all directions; `bias` may be null. A requested kernel refuses problems that
 * it cannot do (choice.cpp). If weights are not all finite another kernel may compute in place of
 * `direct` and `depthwise`. With `winograd`, `conv_fwd_oc_f23_1d` and `conv_fwd_oc_f23_2d` whole
 * numbers are exact while the products of a sum times the largest |x| and |w| stay below 2^18. */
#define ECE408_FAST(T, suffix)                                                                   \
    ECE408_EXPORT int ece408_forward_##suffix(const ece408_problem* problem, const T* x,         \
                                              const T* w, const T* bias, T* y, int accumulate,   \
                                              int threads, int isa, int kernel);                 \
    ECE408_EXPORT int ece408_backward_data_##suffix(                                             \
        const ece408_problem* problem, const T* w, const T* dy, T* dx, int accumulate,           \
        int threads, int isa, int kernel);                                                       \
    ECE408_EXPORT int ece408_backward_weight_##suffix(                                           \
        const ece408_problem* problem, const T* x, const T* dy, T* dw, int accumulate,           \
        int threads, int isa, int kernel);

/* The textbook loops, any convolution, sums in double. `bias` may be null. */
#define ECE408_REFERENCE(T, suffix)                                                              \
    ECE408_EXPORT int ece408_reference_forward_##suffix(                                         \
        const ece408_problem* problem, const T* x, const T* w, const T* bias, T* y,              \
        int accumulate, int threads);                                                            \
    ECE408_EXPORT int ece408_reference_backward_data_##suffix(                                   \
        const ece408_problem* problem, const T* w, const T* dy, T* dx, int accumulate,           \
        int threads);                                                                            \
    ECE408_EXPORT int ece408_reference_backward_weight_##suffix(                                 \
        const ece408_problem* problem, const T* x, const T* dy, T* dw, int accumulate,           \
        int threads);                                                                            \
    ECE408_EXPORT int ece408_reference_backward_bias_##suffix(                                   \
        const ece408_problem* problem, const T* dy, T* dbias, int accumulate, int threads);

#define ECE408_ALL(T, suffix) ECE408_FAST(T, suffix) ECE408_REFERENCE(T, suffix)

ECE408_ALL(float, f32)
ECE408_ALL(double, f64)
ECE408_ALL(uint16_t, f16)
/* For floats with all products and sums in double, rounded once; by `conv_fwd_ow`,
 * `conv_fwd_oc`, `im2col` and `conv_bwd_w_dot`. */
ECE408_FAST(float, strict)

/* The epilogue of a convolution: (output * factor + addend [+ added]), clamped. One factor and addend
 * per filter; `added` is an array like y, or null. NaN stays NaN. */
typedef struct ece408_epilogue {
    const float *factors, *addends, *added;
    float lowest, highest;
} ece408_epilogue;

/* Floats of a layer's packed weights and biases for a kernel's forward pass, the same for images of any
 * number and size, but others if outputs have one row or column; 0 if it reads weights in place. Here and below, ECE408_CHOSEN stands for the kernel
 * that is chosen for kept weights. */
ECE408_EXPORT int64_t ece408_packed_floats(const ece408_problem* problem, int isa, int kernel);

/* Packs them; `packed` has room for ece408_packed_floats. Returns ECE408_UNSUPPORTED if the kernel packs
 * nothing, or cannot compute with weights that are not finite. `bias` may be null. */
ECE408_EXPORT int ece408_pack(const ece408_problem* problem, const float* w, const float* bias,
                              float* packed, int threads, int isa, int kernel);

/* Like ece408_forward_f32 without `accumulate`. `packed`: these weights and biases, packed by ece408_pack
 * for this kernel, or null. `epilogue`, unless null, is applied to each output before it is stored;
 * kernels that cannot do that return ECE408_UNSUPPORTED and have done nothing. */
ECE408_EXPORT int ece408_forward_packed(const ece408_problem* problem, const float* x,
                                        const float* w, const float* bias, const float* packed,
                                        const ece408_epilogue* epilogue, float* y, int threads,
                                        int isa, int kernel);

/* Batch normalisation of arrays (images, channels, pixels) by each channel's mean and variance, with
 * `epsilon` added to the variance; with `is_relu` followed by relu. */
typedef struct ece408_batch {
    int64_t images, channels, pixels;
    double epsilon;
    int is_relu;
} ece408_batch;

/* y = (x - mean) * inverse * gamma + beta [+ added]. Also returns the channel's mean and the inverse of
 * its standard deviation (0 for a deviation of 0). Averages are computed in double, of sums of some
 * hundred floats. Arrays are float32; `added` may be null, and a null `gamma` means 1. */
ECE408_EXPORT int ece408_batch_norm_forward(const ece408_batch* batch, const float* x,
                                            const float* added, const float* gamma,
                                            const float* beta, float* y, float* mean,
                                            float* inverse, int threads, int isa);

/* The gradients for x, for `added` (`dadded` may be null), gamma and beta, from dy. */
ECE408_EXPORT int ece408_batch_norm_backward(const ece408_batch* batch, const float* x,
                                             const float* y, const float* dy, const float* gamma,
                                             const float* mean, const float* inverse, float* dx,
                                             float* dadded, float* dgamma, float* dbeta,
                                             int threads, int isa);

/* Windows along one axis of a plane of `size` elements: `count` windows of `kernel` elements, `stride`
 * apart. The first one begins `pad` elements before the plane; each overlaps the plane. */
typedef struct ece408_windows {
    int64_t size, count, kernel, stride, pad;
} ece408_windows;

/* Pooling of `planes` planes in float32: each window's maximum or, with `heights` and `widths`, its sum
 * divided by the product of its height and its width. */
ECE408_EXPORT int ece408_pool(const ece408_windows* rows, const ece408_windows* columns,
                              const float* heights, const float* widths, int64_t planes,
                              const float* x, float* y, int threads, int isa);

/* Its gradient for x, from x, y and dy. A maximum's gradient goes to the first element of its window that
 * equals y, row by row. Windows need not overlap the plane. With `heights`, `x` and `y` may be null. */
ECE408_EXPORT int ece408_pool_backward(const ece408_windows* rows, const ece408_windows* columns,
                                       const float* heights, const float* widths, int64_t planes,
                                       const float* x, const float* y, const float* dy, float* dx,
                                       int threads, int isa);

/* Conversions of half precision in portable code, which the baseline and the reference use. */
ECE408_EXPORT float ece408_half_to_float(uint16_t bits);
ECE408_EXPORT uint16_t ece408_float_to_half(float value);

/* Ceilings of the machine, for benchmarks; arrays are aligned to 64 bytes. The first runs `thousands`
 * thousand rounds of multiply-adds and returns the number of floating-point operations; the second
 * writes `floats` floats by non-temporal stores, the third reads them once. Without the instruction
 * set they return 0 operations and ECE408_UNSUPPORTED. */
ECE408_EXPORT double ece408_ceiling_multiply_adds(int64_t thousands, int threads, int isa);
ECE408_EXPORT int ece408_ceiling_stores(float* to, int64_t floats, int threads, int isa);
ECE408_EXPORT int ece408_ceiling_reads(const float* from, int64_t floats, int threads, int isa);

/* Computes chunks [begin, end) of some work as thread number `thread`. */
typedef void ece408_chunks(const void* work, int64_t begin, int64_t end, int thread);

/* Parallel for: computes `count` chunks of some work, each once and in any order, on the caller's thread
 * and on threads of the pool that have a core, at most `threads` in all. Each has its own number below
 * `threads`. Returns when all chunks are done. */
ECE408_EXPORT void ece408_parallel_for(int threads, int64_t count, ece408_chunks* chunk,
                                const void* work);

/* With `threads` above 0, this thread's calls use workers, not OpenMP's threads; `threads` - 1 workers are
 * woken. With 0 they may use OpenMP's threads again. */
ECE408_EXPORT void ece408_use_workers(int threads);

/* One copy of bytes. */
typedef struct {
    void* to;
    const void* from;
    int64_t nbytes;
} ece408_copied;

/* Makes `count` copies by at most `threads` threads, with non-temporal stores; no memory that is written
 * may be part of another copy. */
ECE408_EXPORT void ece408_copy(const ece408_copied* copies, int count, int threads);

/* Populates the pages of a fresh array, if the system can do that; contents stay. */
ECE408_EXPORT void ece408_populate(void* address, int64_t nbytes, int threads);

/* Advises the system to use huge pages for the missing pages of a large array. */
ECE408_EXPORT void ece408_ask_for_huge_pages(void* address, int64_t nbytes);

#ifdef __cplusplus
}
#endif

#endif
