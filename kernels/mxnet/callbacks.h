/* Calls between the library of this folder, which MXNet loads, and Python, in addition to MXNet's own
 * lib_api.h. */
#pragma once

#include <mxnet/c_api.h>

#include <cstdint>

#include "../cpu/network/program.h"

extern "C" {

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
struct ece408_plan {
    void* function;
    int threads, isa, kernel;
    ece408_bias_gradient* bias_gradient;
    int workspace_bytes;
};

/* The byte offset in a launch's arguments of an array's address, and the array: its index in the call,
 * or the workspace. */
#define ECE408_WORKSPACE 4
struct ece408_slot {
    int offset, array;
};

/* One launch of a CUDA kernel: its CUfunction, and its argument buffer. */
struct ece408_launch {
    void* function;
    unsigned int grid[3], block[3], shared_bytes;
    int argument_bytes, slot_count;
    const char* arguments;
    const ece408_slot* slots;
};

/* Appends a launch to a plan that is being filled in. */
ECE408_EXPORT void ece408_forward_launch(ece408_plan* plan, const ece408_launch* launch);

/* Functions of CUDA's driver: cuLaunchKernel, cuStreamSynchronize, cuEventCreate, cuEventRecord,
 * cuEventElapsedTime and cuEventDestroy_v2. */
struct ece408_driver {
    int (*launch)(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                  unsigned int block_x, unsigned int block_y, unsigned int block_z,
                  unsigned int shared_bytes, void* stream, void** parameters, void** extra);
    int (*synchronize)(void* stream);
    int (*create_event)(void** event, unsigned int flags);
    int (*record)(void* event, void* stream);
    int (*elapsed)(float* milliseconds, void* begin, void* end);
    int (*destroy_event)(void* event);
};

/* Before the first plan with launches. */
ECE408_EXPORT void ece408_forward_drive(const ece408_driver* driver);

/* A call of a layer, described by its node's attribute (and, on a line of its own, its name), in a
 * direction of ece408.h, on this GPU or on the CPU, for data of MXNet's type number `type` and of batch,
 * channels, height and width `sizes`. */
#define ECE408_ON_CPU -1
struct ece408_call {
    const char* layer;
    int direction, gpu, type;
    int64_t sizes[4];
};

/* Functions of Python, which return 0 if they failed, and two of another library. */
struct ece408_forward_functions {
    /* Fills in the plan for a call; with a NULL layer, only the threads and the instruction set. */
    int (*ask)(const ece408_call* call, ece408_plan* plan);
    /* Computes it. The arrays are x, w, bias and y, or w, dy and dx, or x, dy, dw and dbias; NULL for
     * a missing one. */
    int (*compute)(const ece408_call* call, void* const* arrays);
    /* Takes its duration by a plan, and that of its GPU kernels. */
    int (*report)(const ece408_call* call, const ece408_plan* plan, double seconds,
                  double gpu_seconds);
    decltype(&ece408_run) run;
    decltype(&ece408_use_workers) use_workers;
};

/* Before the first call. Only nodes with the attribute `key` of this value are accepted. */
ECE408_EXPORT void ece408_forward_use(const ece408_forward_functions* functions, const char* key);

/* Discards every plan: Python plans the next call again. */
ECE408_EXPORT void ece408_forward_forget(void);

/* Whether every call of a plan's function is reported from now on. */
ECE408_EXPORT void ece408_forward_log(int is_open);

/* From now on nothing is kept: arrays may be in memory with writes that MXNet does not count. */
ECE408_EXPORT void ece408_memory_is_shared(void);

/* 1 if the array of a handle is in memory that is not MXNet's own. */
ECE408_EXPORT int ece408_is_foreign(const void* handle);

/* The number of completed writes to the array of a handle. MXNet counts for all arrays in the same
 * memory; during a write, the count is not reliable. */
ECE408_EXPORT int64_t ece408_writes_to(const void* handle);

/* MXNet's variable of the array of a handle: one for all arrays in the same memory; 0 if it has no memory
 * yet, not even planned. */
ECE408_EXPORT const void* ece408_variable_of(const void* handle);

/* The deleter of a DLPack tensor: sets its manager, an `int`, to 0. */
ECE408_EXPORT void ece408_memory_is_free(void* tensor);

/* What Python makes of a part of a graph for inputs of given shapes. */
struct ece408_program;

/* What Python ends, by its number: a part; a program, or what is kept; a recorded call. */
enum ece408_ended { ECE408_PART, ECE408_CODE, ECE408_RECORDED };

/* Functions of Python for parts, which have numbers. Each returns 0 if it failed. */
struct ece408_part_functions {
    /* Makes a program by `ece408_part_take`. `sizes` has for each input its type, by MXNet's number,
     * its number of dimensions, and these. Only failures in a call are reported. */
    int (*make)(int64_t part, const int64_t* sizes, int64_t count, ece408_program* program,
                int is_call);
    /* Takes the seconds of each of `count` steps of a call from step `first` on, or the status of a
     * step that failed, and its kind. */
    int (*report)(int64_t program, const double* seconds, int64_t first, int64_t count, int status,
                  int64_t step, int64_t kind);
    /* Computes a call of a part that Python computes, with this version of all inputs but data, and
     * the versions and addresses of inputs and outputs. For a part with gradients: a pass of the
     * recorded call of this number, which is not 0; versions are MXNet's counts of writes. `backward`,
     * the inputs are followed by the gradients for the outputs, the wanted gradients, and the moving
     * averages. */
    int (*compute)(int64_t part, int64_t program, int64_t call, int backward, uint64_t version,
                   const uint64_t* versions, void* const* addresses);
    int (*end)(int what, int64_t number);
};

/* The kinds of a part's inputs, one character each: data, with a row for each image; a parameter; or
 * a computed array that is the same for all images. */
#define ECE408_DATA '0'
#define ECE408_PARAMETER '1'
#define ECE408_FOR_ALL_IMAGES '2'

/* Opens a part. `kinds` has the kind of each input, and `types` the types of all inputs and outputs.
 * With `in_python`, Python computes it; its programs have only the shapes of outputs, and a number. */
ECE408_EXPORT void ece408_part_open(int part, const char* kinds, const int* types, int arrays,
                                    int in_python);

/* Gives the part gradients. Of `count` inputs: one whose gradient is wanted, in the order of the
 * program's results; a moving average, for the results after these; and a gamma that training sets to
 * 1, as MXNet's BatchNorm does. */
enum ece408_use { ECE408_WANTED, ECE408_MOVING_AVERAGE, ECE408_SET_TO_1, ECE408_USES };
ECE408_EXPORT void ece408_part_train(int part, const int* inputs, const int* uses, int count);

/* Whether backward passes from now on are of prediction. Parts refuse them if they moved averages: the
 * status of their report is ECE408_PREDICTS. */
#define ECE408_PREDICTS (-1)
ECE408_EXPORT void ece408_part_predict(int predicts);

/* Before calls with other arrays, of these kinds, and with no call in progress. */
ECE408_EXPORT void ece408_part_forget(int part, const char* kinds);

/* No new node has this part from now on; it ends with its last node. */
ECE408_EXPORT void ece408_part_release(int part);

/* What Python makes: a program, whose number is negative, or packed weights that no program before it
 * keeps, which steps make. Operands of a program's steps are in an arena of `bytes`, the inputs, the
 * outputs, and what is `kept`, by numbers; those of what is kept are in nothing, the inputs, what is
 * `kept` before, and itself, of `bytes`. `weights` are the places of packed weights in it; for a program,
 * the inputs that it also reads in place. `outputs` has for each output of a program its number of
 * dimensions, and these. With gradients, the backward pass follows `forward_steps`; for it the outputs'
 * gradients are in their place, then come the wanted gradients, the new averages, and `saved_bytes` that
 * the passes share. */
struct ece408_code {
    const ece408_step* steps;
    const int64_t *outputs, *kept, *weights;
    int64_t number, step_count, output_count, kept_count, weight_count, bytes;
    int64_t isa, forward_steps, saved_bytes;
};

/* Copies it for the program; 0 if there is no memory, or something is not kept any more. */
ECE408_EXPORT int ece408_part_take(ece408_program* program, const ece408_code* made);

/* Functions of MXNet's C interface. */
struct ece408_mxnet {
    decltype(&MXNDArrayWaitToRead) wait_to_read;
    decltype(&MXNDArrayGetData) data;
    decltype(&MXNDArrayCreateEx) create;
    decltype(&MXEnginePushSyncND) push;
};

/* Before the first part. */
ECE408_EXPORT void ece408_part_use(const ece408_part_functions* functions,
                                   const ece408_mxnet* of_mxnet);

/* A call on the caller's thread, without MXNet's CachedOp, of a part whose weights are as in its last
 * call by MXNet: 1, with the handles of new arrays in `results`; 0 if that is impossible, also because
 * data is pending, or its memory takes more than `most_bytes`; -1 if MXNet failed; MXNet has the error.
 * 2 if Python must compute the new arrays, of weights of this `version`, which it may not read. The
 * caller frees the arrays in `results` in each case. */
ECE408_EXPORT int ece408_part_call(int part, void* const* inputs, void** results, int64_t most_bytes,
                                   uint64_t* version);

/* Puts others in the place of the functions of an operator in Python, which MXNet can call at any time: those
 * of MXNet's CustomOpPropCallbacks, then CustomOpCallbacks, and its CustomOpPropCreator, which is returned. */
ECE408_EXPORT CustomOpPropCreator ece408_guarded(CustomOpPropCreator creator,
                                                 int (**functions)(void));

/* Around a fork, with Python's lock: delays signals and calls `action`; then delivers them. */
ECE408_EXPORT void ece408_before_fork(void (*action)(void));
ECE408_EXPORT void ece408_after_fork_in_parent(void);
ECE408_EXPORT void ece408_after_fork_in_child(void);

typedef struct _object PyObject;

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

}
