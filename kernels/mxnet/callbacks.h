/* How the library of this folder, which MXNet loads, calls Python back, besides what MXNet's own
 * lib_api.h says. */
#ifndef ECE408_CALLBACKS_H
#define ECE408_CALLBACKS_H

#include <stdint.h>

#include "../cpu/ece408.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A forward function of ece408.h for float32, or for another type its arrays are of. */
typedef int ece408_kernel(const ece408_problem* problem, const void* x, const void* w,
                          const void* bias, void* y, int accumulate, int threads, int isa);

/* What computes a call; without a kernel, Python does. */
typedef struct ece408_plan {
    ece408_kernel* kernel;
    int threads, isa;
} ece408_plan;

/* Fills in the plan for a layer, described by its node's attribute, or with NULL the threads for
 * anything else, on data of MXNet's type number `type` and of batch, channels, height and width
 * `sizes`. */
typedef void ece408_ask(const char* layer, int type, const int64_t* sizes, ece408_plan* plan);

/* Computes the same call itself; 0 if it failed. */
typedef int ece408_compute(const char* layer, int type, const int64_t* sizes, const void* x,
                           const void* w, const void* bias, void* y);

/* The function ece408_share. */
typedef void ece408_sharing(int threads, int64_t count, ece408_pieces* pieces, const void* work);

/* Before the first call. Only nodes with the attribute `key` of this value are accepted. */
ECE408_EXPORT void ece408_forward_use(ece408_ask* ask, ece408_compute* compute,
                                      ece408_sharing* share, const char* key);

/* Has every plan asked for anew. */
ECE408_EXPORT void ece408_forward_forget(void);

#ifdef __cplusplus
}
#endif

#endif
