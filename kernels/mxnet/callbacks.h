/* Calls between the library of this folder, which MXNet loads, and Python, in addition to MXNet's own
 * lib_api.h. */
#ifndef ECE408_CALLBACKS_H
#define ECE408_CALLBACKS_H

#include <stdbool.h>
#include <stdint.h>

#include "../cpu/api/ece408.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The functions of ece408.h for float32 or another type: forward, for either gradient, and the textbook
 * loop for the bias's. */
typedef int ece408_function(const ece408_problem* problem, const void* x, const void* w,
                            const void* bias, void* y, int accumulate, int threads, int isa,
                            int kernel);
typedef int ece408_gradient(const ece408_problem* problem, const void* w_or_x, const void* dy,
                            void* dx_or_dw, int accumulate, int threads, int isa, int kernel);
typedef int ece408_bias_gradient(const ece408_problem* problem, const void* dy, void* dbias,
                                 int accumulate, int threads);

/* The function that computes a call in its direction on the CPU, and its last arguments. On a GPU the
 * plan has launches instead, with one workspace. Without either, Python computes. */
typedef struct ece408_plan {
    void* function;
    int threads, isa, kernel;
    ece408_bias_gradient* bias_gradient;
    int workspace_bytes;
} ece408_plan;

/* The byte offset in a launch's arguments of an array's address, and the array: its index in the call,
 * or the workspace. */
#define ECE408_WORKSPACE 4
typedef struct ece408_slot {
    int offset, array;
} ece408_slot;

/* One launch of a CUDA kernel: its CUfunction, and its argument buffer. */
typedef struct ece408_launch {
    void* function;
    unsigned int grid[3], block[3], shared_bytes;
    int argument_bytes, slot_count;
    const char* arguments;
    const ece408_slot* slots;
} ece408_launch;

/* Appends a launch to a plan that is being filled in. */
ECE408_EXPORT void ece408_forward_launch(ece408_plan* plan, const ece408_launch* launch);

/* Functions of CUDA's driver: cuLaunchKernel, cuStreamSynchronize, cuEventCreate, cuEventRecord,
 * cuEventElapsedTime and cuEventDestroy_v2. */
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

/* Nodes whose attribute `keeps` is this owner keep packed weights between calls, until it is released.
 * The caller keeps the nodes' last arrays alive. Before a call with other arrays, and with no call in
 * flight, the nodes forget them; `keeps` says whether they pack weights again. */
ECE408_EXPORT void ece408_weights_own(const char* owner);
ECE408_EXPORT void ece408_weights_forget(const char* owner, int keeps);
ECE408_EXPORT void ece408_weights_release(const char* owner);

/* From now on nothing is kept: arrays may be in memory with writes that MXNet does not count. */
ECE408_EXPORT void ece408_weights_are_shared(void);

/* Sequences whose attribute `holds` names this owner hold copies of their parameters between calls, until
 * it is released. A call that makes new copies must not overlap with a call that uses the old ones. */
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

/* 1 if the owner's sequence holds the current values of these arrays, so that a call without them has the
 * same result. 0 if not; -1 if MXNet failed; MXNet has the error. */
ECE408_EXPORT int ece408_held_are_current(const char* owner, void* const* handles,
                                          const ece408_mxnet* functions);

typedef struct _object PyObject;

/* Direct calls of a sequence that is a whole graph and holds its small parameters. `texts` has keys and
 * values of its attributes, `arrays` its inputs: a call's data, with their index in `numbers`, and
 * parameters, with -1. The caller keeps these arrays alive until it is closed, and so the last one, which
 * the sequence does not read. NULL if such calls are impossible. */
typedef struct ece408_direct ece408_direct;
ECE408_EXPORT ece408_direct* ece408_direct_open(const ece408_mxnet* mxnet, int attributes,
                                                const char* const* texts, int inputs,
                                                const int* numbers, void* const* arrays,
                                                int outputs);

/* One call, with `data` and the handles of the held parameters. The caller has Python's lock, which the
 * call releases while it computes. `results` are NULL before; the caller frees the arrays in it, whatever
 * the call returns. Returns 1 with results, which are usually complete; 0 if the call differs from the
 * first one in more than its data's values, or one of Python's `lists` does not begin with its object in
 * `firsts`; -1 if MXNet failed; MXNet has the error. */
ECE408_EXPORT int ece408_direct_call(ece408_direct* direct, void* const* data, void* const* held,
                                     void** results, PyObject* const* lists,
                                     PyObject* const* firsts, int count);
ECE408_EXPORT void ece408_direct_close(ece408_direct* direct);

/* 1 if none of these arrays, which are in MXNet's own memory, was written since the call before with
 * these counts of writes, which it updates; it waits for pending writes. */
ECE408_EXPORT int ece408_parameters_unchanged(void* const* handles, uint64_t* counts, int count,
                                              int (*wait_to_read)(void* handle));

/* 1 if one of the arrays of these handles is in memory that is not MXNet's own. */
ECE408_EXPORT int ece408_are_foreign(void* const* handles, int count);

/* The number of MXNet's writes to the array of this handle. */
ECE408_EXPORT uint64_t ece408_held_writes(const void* handle);

/* The deleter of a DLPack tensor: sets its manager, an `int`, to 0. */
ECE408_EXPORT void ece408_memory_is_free(void* tensor);

/* Fills in the plan for a layer, described by its node's attribute, in a direction of ece408.h, for data of
 * MXNet's type number `type` and of batch, channels, height and width `sizes`; `keeps`: packed weights are
 * kept. With a NULL layer, only the threads and the instruction set. */
typedef void ece408_ask(const char* layer, int direction, int gpu, int type, const int64_t* sizes,
                        int keeps, ece408_plan* plan);

/* Computes the same call in Python; 0 if it failed. The arrays are x, w, bias and y, or w, dy and dx,
 * or x, dy, dw and dbias; NULL for a missing one. */
typedef int ece408_compute(const char* layer, int direction, int gpu, int type,
                           const int64_t* sizes, void* const* arrays);

/* Takes the duration of such a call by a plan, and of its GPU kernels, in seconds; 0 if that failed. */
typedef int ece408_report(const char* layer, int direction, int gpu, int type,
                          const int64_t* sizes, const ece408_plan* plan, double seconds,
                          double gpu_seconds);

/* The functions of ece408.h with these names, in another library. */
typedef struct ece408_others {
    ece408_function* forward_f32;
    int64_t (*packed_floats)(const ece408_problem* problem, int isa, int kernel);
    int (*pack)(const ece408_problem* problem, const float* w, const float* bias, float* packed,
                int threads, int isa, int kernel);
    int (*forward_packed)(const ece408_problem* problem, const float* x, const float* w,
                          const float* bias, const float* packed, const ece408_epilogue* epilogue,
                          float* y, int threads, int isa, int kernel);
    void (*parallel_for)(int threads, int64_t count, ece408_chunks* chunk, const void* work);
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

/* Discards every plan: Python plans the next call again. */
ECE408_EXPORT void ece408_forward_forget(void);

/* Whether every call of a plan's function is reported from now on. */
ECE408_EXPORT void ece408_forward_log(int is_open);

/* The maximum number of dimensions of a network's operators. */
#define ECE408_MOST_DIMENSIONS 8

/* An array on the host that is an input or an output of a network. Its type is MXNet's number, or -1 if it
 * is sparse. Versions of an input are equal only if its values are. Dimensions beyond the maximum are
 * omitted. */
typedef struct ece408_array {
    const void* data;
    uint64_t version;
    int64_t type, dimensions, shape[ECE408_MOST_DIMENSIONS];
} ece408_array;

/* The kinds of a network's inputs, one character each: data, with a row for each image; a parameter; or
 * a computed array that is the same for all images. */
#define ECE408_DATA '0'
#define ECE408_PARAMETER '1'
#define ECE408_FOR_ALL_IMAGES '2'

/* Makes a network from a graph, in MXNet's JSON, and its inputs: their kinds, numbers of dimensions and
 * first sizes. Corrects the kind of data without a row for each image. `unread` has a '1' for each output
 * of which only the shape is used; then a space, and the machine if that is no GPU. Returns the
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

/* Nodes whose attribute `owner` is this one have one network until its release. The arrays of their
 * parameters do not change. */
ECE408_EXPORT void ece408_network_own(const char* owner);
ECE408_EXPORT void ece408_network_release(const char* owner);

/* Takes the parameters of a network that Python runs itself; 0 if that failed. */
typedef int ece408_parameters_seen(int network, int64_t count, const ece408_array* arrays);

/* Before the first node of the operator `ece408_parameters`. */
ECE408_EXPORT void ece408_parameters_use(ece408_parameters_seen* seen);

/* MXNet's CustomOpPropCreator. */
typedef int ece408_creator(void);

/* Wraps an operator's creator in Python: MXNet can call the made operator at any time. */
ECE408_EXPORT ece408_creator* ece408_guarded(ece408_creator* creator);

/* A function in Python that neither takes nor returns anything. */
typedef void ece408_action(void);

/* Around a fork, with Python's lock: delays signals and calls `action`; then delivers them. */
ECE408_EXPORT void ece408_before_fork(ece408_action* action);
ECE408_EXPORT void ece408_after_fork_in_parent(void);
ECE408_EXPORT void ece408_after_fork_in_child(void);

/* With Python's lock: 1 if each of `count` Python lists begins with its object. */
ECE408_EXPORT int ece408_are_first(PyObject* const* lists, PyObject* const* objects, int count);

/* Replaces Python's `sys.unraisablehook`, which is passed as `otherwise`: an exception that the
 * handler of a signal raised inside a callback, where Python would drop it, is raised by the next
 * Python code. */
ECE408_EXPORT PyObject* ece408_unraisable(PyObject* is_of_signal, PyObject* otherwise,
                                          PyObject* given);

/* Shuts MXNet down at the end of the process, with its MXNDArrayWaitAll and MXNotifyShutdown; from then
 * on Python is not called. Returns 1 after the shutdown, or 0 if it takes longer than some seconds, or
 * other threads of the process may be in MXNet's functions: then the process ends without it. */
ECE408_EXPORT int ece408_end(int (*wait_for_all)(void), int (*notify_shutdown)(void),
                             int has_others);

#ifdef __cplusplus
}
#endif

#endif
