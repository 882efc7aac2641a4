/* How the library of this folder, which MXNet loads, calls Python back, besides what MXNet's own
 * lib_api.h says. */
#ifndef ECE408_CALLBACKS_H
#define ECE408_CALLBACKS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cpu/api/ece408.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The functions of ece408.h for float32, or for another type their arrays are of: forward, for
 * either gradient, and the textbook one for that of the bias. */
typedef int ece408_function(const ece408_problem* problem, const void* x, const void* w,
                            const void* bias, void* y, int accumulate, int threads, int isa,
                            int kernel);
typedef int ece408_gradient(const ece408_problem* problem, const void* w_or_x, const void* dy,
                            void* dx_or_dw, int accumulate, int threads, int isa, int kernel);
typedef int ece408_bias_gradient(const ece408_problem* problem, const void* dy, void* dbias,
                                 int accumulate, int threads);

/* What computes a call in its direction on the CPU, and its last arguments. On a GPU it has launches
 * instead, which share a workspace there. Without either, Python computes. */
typedef struct ece408_plan {
    void* function;
    int threads, isa, kernel;
    ece408_bias_gradient* bias_gradient;
    int workspace_bytes;
} ece408_plan;

/* Where in a launch's arguments, in bytes, which array's address goes: the number of one of a
 * call's arrays, or the workspace. */
#define ECE408_WORKSPACE 4
typedef struct ece408_slot {
    int offset, array;
} ece408_slot;

/* One launch of a CUDA kernel: its CUfunction, and its arguments as they lie in memory. */
typedef struct ece408_launch {
    void* function;
    unsigned int grid[3], block[3], shared_bytes;
    int argument_bytes, slot_count;
    const char* arguments;
    const ece408_slot* slots;
} ece408_launch;

/* Adds a launch, behind those that it has, to a plan that is being filled in. */
ECE408_EXPORT void ece408_forward_launch(ece408_plan* plan, const ece408_launch* launch);

/* Functions of CUDA's driver, whose names there are cuLaunchKernel, cuStreamSynchronize,
 * cuEventCreate, cuEventRecord, cuEventElapsedTime and cuEventDestroy_v2. */
typedef struct ece408_driver {
    int (*launch)(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                  unsigned int block_x, unsigned int block_y, unsigned int block_z,
                  unsigned int shared_bytes, void* stream, void** parameters, void** extra);
    int (*synchronize)(void* stream);
    int (*create_event)(void** event, unsigned int flags);
    int (*record)(void* event, void* stream);
    int (*elapsed)(float* milliseconds, void* begin, void* end);
    int (*destroy_event)(void* event);
} ece408_driver;

/* Before the first plan with launches. */
ECE408_EXPORT void ece408_forward_drive(const ece408_driver* driver);

/* The number of the GPU that arrays are on, or this one. */
#define ECE408_ON_CPU -1

/* Nodes whose attribute `keeps` is this owner keep their weights packed from call to call, until it is
 * released. Whoever calls these keeps the arrays alive that the nodes were given last. Before a call with
 * other arrays, and with no call under way, the nodes forget; then they keep something or not. */
ECE408_EXPORT void ece408_weights_own(const char* owner);
ECE408_EXPORT void ece408_weights_forget(const char* owner, int keeps);
ECE408_EXPORT void ece408_weights_release(const char* owner);

/* From now on nothing is kept: arrays may be in memory that others write to. */
ECE408_EXPORT void ece408_weights_are_shared(void);

/* Sequences whose attribute `holds` names this owner hold their parameters from one call to the next,
 * until it is released. Before another call that holds them none may be under way that does without. */
ECE408_EXPORT void ece408_held_own(const char* owner);
ECE408_EXPORT void ece408_held_forget(const char* owner);
ECE408_EXPORT void ece408_held_release(const char* owner);

/* Functions of MXNet's C interface: the first three are MXNDArrayWaitToRead, MXNDArrayGetData and
 * MXNDArrayGetShapeEx. */
typedef struct ece408_mxnet {
    int (*wait_to_read)(void* array);
    int (*data)(void* array, void** data);
    int (*shape)(void* array, int* dimensions, const int** sizes);
    int (*type)(void* array, int* type);
    int (*storage_type)(void* array, int* type);
    int (*context)(void* array, int* device_type, int* device);
    int (*create)(const unsigned* shape, unsigned dimensions, int device_type, int device,
                  int delays, int type, void** array);
    int (*is_recording)(bool* answer);
    int (*is_training)(bool* answer);
    int (*push)(void (*run)(void* context, void* task), void* task, void (*end)(void* task),
                const void* context, void* const* reads, int read_count, void* const* writes,
                int write_count, const void* property, int priority, const char* name);
} ece408_mxnet;

/* 1 if the arrays of these handles have the values that the owner's sequence holds of them, and a call
 * without them has the same result. 0 if not; -1 if MXNet failed, whose error says why. */
ECE408_EXPORT int ece408_held_are_current(const char* owner, void* const* handles,
                                          const ece408_mxnet* functions);

typedef struct _object PyObject;

/* Direct calls of a sequence that holds its small parameters and is all of a graph. `texts` has keys and
 * values of its attributes, `arrays` what it is given: data of a call, whose `numbers` are those among
 * the data, and parameters with the number -1. These arrays, and the last one, which it does not read,
 * are to be kept alive until it is closed. NULL if there cannot be such calls. */
typedef struct ece408_direct ece408_direct;
ECE408_EXPORT ece408_direct* ece408_direct_open(const ece408_mxnet* mxnet, int attributes,
                                                const char* const* texts, int inputs,
                                                const int* numbers, void* const* arrays,
                                                int outputs);

/* One call, with `data` and the handles of what the sequence holds, with Python's lock, which it gives up
 * while it computes. `results` are NULL before, and arrays in it afterwards are the caller's to free, whatever
 * the call returns. Returns 1 when it has results, most often when they are computed. Returns 0 if the call
 * is not like the first in anything but the values of its data, or `lists` of Python's do not begin with the
 * objects `firsts`, each with its own; -1 if MXNet failed, whose error says why. */
ECE408_EXPORT int ece408_direct_call(ece408_direct* direct, void* const* data, void* const* held,
                                     void** results, PyObject* const* lists,
                                     PyObject* const* firsts, int count);
ECE408_EXPORT void ece408_direct_close(ece408_direct* direct);

/* 1 if one of the arrays of these handles lies in memory that is not MXNet's own. */
ECE408_EXPORT int ece408_are_foreign(void* const* handles, int count);

/* How often MXNet has written to the array of this handle. */
ECE408_EXPORT uint64_t ece408_held_writes(const void* handle);

/* The deleter of a tensor of DLPack whose manager is the `int` that is to become 0. */
ECE408_EXPORT void ece408_memory_is_free(void* tensor);

/* Fills in the plan for a layer, described by its node's attribute, or with NULL the threads and the
 * instruction set for anything else, in a direction of ece408.h's on data of MXNet's type number `type` and of batch,
 * channels, height and width `sizes`, where `keeps` says whether its weights are kept packed. */
typedef void ece408_ask(const char* layer, int direction, int gpu, int type, const int64_t* sizes,
                        int keeps, ece408_plan* plan);

/* Computes the same call itself; 0 if it failed. The arrays are x, w, bias and y, or w, dy and dx,
 * or x, dy, dw and dbias; NULL for one that there is not. */
typedef int ece408_compute(const char* layer, int direction, int gpu, int type,
                           const int64_t* sizes, void* const* arrays);

/* Takes how long such a call took by a plan, in seconds, and of that the kernels of a GPU; 0 if that
 * failed. */
typedef int ece408_report(const char* layer, int direction, int gpu, int type,
                          const int64_t* sizes, const ece408_plan* plan, double seconds,
                          double gpu_seconds);

/* The functions of ece408.h of these names, which are in another library. */
typedef struct ece408_others {
    ece408_function* forward_f32;
    int64_t (*packed_floats)(const ece408_problem* problem, int isa, int kernel);
    int (*pack)(const ece408_problem* problem, const float* w, const float* bias, float* packed,
                int threads, int isa, int kernel);
    int (*forward_packed)(const ece408_problem* problem, const float* x, const float* w,
                          const float* bias, const float* packed, const ece408_epilogue* finish,
                          float* y, int threads, int isa, int kernel);
    void (*share)(int threads, int64_t count, ece408_pieces* pieces, const void* work);
    void (*use_workers)(int threads);
    int (*batch_norm_forward)(const ece408_batch* batch, const float* x, const float* added,
                              const float* gamma, const float* beta, float* y, float* mean,
                              float* inverse, int threads, int isa);
    int (*batch_norm_backward)(const ece408_batch* batch, const float* x, const float* y,
                               const float* dy, const float* gamma, const float* mean,
                               const float* inverse, float* dx, float* dadded, float* dgamma,
                               float* dbeta, int threads, int isa);
    int (*pool)(const ece408_windows* rows, const ece408_windows* columns, const float* heights,
                const float* widths, int64_t planes, const float* x, float* y, int threads, int isa);
} ece408_others;

/* Before the first call. Only nodes with the attribute `key` of this value are accepted. */
ECE408_EXPORT void ece408_forward_use(ece408_ask* ask, ece408_compute* compute,
                                      ece408_report* report, const ece408_others* others,
                                      const char* key);

/* Forgets every plan: the next call asks Python again. */
ECE408_EXPORT void ece408_forward_forget(void);

/* Has every call of a plan's function reported from now on, or none. */
ECE408_EXPORT void ece408_forward_log(int is_open);

/* More dimensions than any operator has that a network may consist of. */
#define ECE408_MOST_DIMENSIONS 8

/* An array on the host that MXNet hands a network, or wants it to fill. Its type is MXNet's number,
 * or -1 if it is sparse. Versions of an input are equal only if its values are. Of more than the
 * most dimensions, the rest is left out. */
typedef struct ece408_array {
    const void* data;
    uint64_t version;
    int64_t type, dimensions, shape[ECE408_MOST_DIMENSIONS];
} ece408_array;

/* What a network's inputs are, one character each: data, with a row for each image; a parameter; or
 * an array that is computed, but is the same for all images. */
#define ECE408_DATA '0'
#define ECE408_PARAMETER '1'
#define ECE408_FOR_ALL_IMAGES '2'

/* Makes a network of a graph, in MXNet's JSON, and of its inputs: what they are, how many dimensions
 * they have and the first size of each. Data that turns out to have no row for each image is written
 * as what it is. `unread` has a '1' for each output of which only the shape is of use. Returns the
 * network's number, or 0 if that failed. */
typedef int ece408_network_open(const char* graph, char* inputs, const int64_t* dimensions,
                                const int64_t* first_sizes, const char* unread);

/* Runs it; 0 if it failed. */
typedef int ece408_network_compute(int network, int64_t data, const ece408_array* data_arrays,
                                   int64_t parameters, const ece408_array* parameter_arrays,
                                   int64_t outputs, const ece408_array* output_arrays);

/* Ends it; returns 1. */
typedef int ece408_network_close(int network);

/* Before the first network. */
ECE408_EXPORT void ece408_network_use(ece408_network_open* open, ece408_network_compute* compute,
                                      ece408_network_close* close);

/* Nodes whose attribute `owner` is this one share a network until that is released. The arrays of
 * their parameters are never others. */
ECE408_EXPORT void ece408_network_own(const char* owner);
ECE408_EXPORT void ece408_network_release(const char* owner);

/* Takes the parameters of a network that Python runs itself; 0 if that failed. */
typedef int ece408_parameters_seen(int network, int64_t count, const ece408_array* arrays);

/* Before the first node of the operator `ece408_parameters`. */
ECE408_EXPORT void ece408_parameters_use(ece408_parameters_seen* seen);

/* MXNet's CustomOpPropCreator. */
typedef int ece408_creator(void);

/* In the place of an operator's creator in Python: what it makes can be called at any time. */
ECE408_EXPORT ece408_creator* ece408_guarded(ece408_creator* creator);

/* A function in Python that neither takes nor returns anything. */
typedef void ece408_action(void);

/* Around a fork, with Python's lock: puts signals off and calls `action`; then lets them through. */
ECE408_EXPORT void ece408_before_fork(ece408_action* action);
ECE408_EXPORT void ece408_after_fork_in_parent(void);
ECE408_EXPORT void ece408_after_fork_in_child(void);

/* With Python's lock: 1 if so many lists of Python's begin with these objects, each with its own. */
ECE408_EXPORT int ece408_are_first(PyObject* const* lists, PyObject* const* objects, int count);

/* Replaces Python's `sys.unraisablehook`, which is passed as `otherwise`: an exception that the
 * handler of a signal raised inside a callback, where Python would drop it, is raised by the next
 * Python code. */
ECE408_EXPORT PyObject* ece408_unraisable(PyObject* is_of_signal, PyObject* otherwise,
                                          PyObject* given);

/* Brings MXNet to rest at the end of the process, with its MXNDArrayWaitAll and MXNotifyShutdown;
 * from then on Python is not called. Returns 1 when MXNet is at rest, or 0 when that takes longer
 * than some seconds, or the process has other threads, which may be in MXNet's functions: then it
 * will end without MXNet. */
ECE408_EXPORT int ece408_end(int (*wait_for_all)(void), int (*notify_shutdown)(void),
                             int has_others);

#ifdef __cplusplus
}
#endif

#endif
