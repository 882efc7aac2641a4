// Small programs by name: a kernel each, with one fault. A comment marks the line of the fault:
//     // NAME: the emulator's kind of finding
// A line may have several. Programs without such a line are correct, and their names begin with
// right_. With nvcc: program NAME.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cassert>
#include <cstdio>
#include <cstring>

// Arrays on the GPU: an initialised one, and an uninitialised one.
struct Arrays {
    static constexpr int COUNT = 256;
    float *x, *y;

    explicit Arrays(int count = COUNT) {
        cudaMalloc(&x, count * sizeof(float));
        cudaMalloc(&y, count * sizeof(float));
        cudaMemset(x, 0, count * sizeof(float));
    }
    ~Arrays() {
        cudaFree(x);
        cudaFree(y);
    }
};

struct Program {
    const char* name;
    void (*run)();
    Program* next;
    static Program*& first() {
        static Program* found = nullptr;
        return found;
    }
    Program(const char* name, void (*run)()) : name(name), run(run), next(first()) { first() = this; }
};

// PROGRAM(name) { ... }: what the host does.
#define PROGRAM(name)                                   \
    static void run_##name();                           \
    static Program program_##name(#name, run_##name);   \
    static void run_##name()

// KERNEL_AFTER(name, set-up, (parameters), grid, block, arguments...) { ... }: a kernel, and the program
// of this name, which launches it.
#define KERNEL_AFTER(name, set_up, parameters, grid, block, ...) \
    __global__ void name parameters;                             \
    PROGRAM(name) {                                              \
        set_up;                                                  \
        name<<<grid, block>>>(__VA_ARGS__);                      \
    }                                                            \
    __global__ void name parameters
// The same on the pointers of arrays `a`.
#define KERNEL(name, ...) KERNEL_AFTER(name, Arrays a, __VA_ARGS__)

// cudaError_t of the program of this name, or -1 if there is none.
extern "C" int run(const char* name) {
    for (Program* each = Program::first(); each; each = each->next) {
        if (strcmp(each->name, name)) continue;
        each->run();
        const int error = cudaGetLastError();
        return error ? error : cudaDeviceSynchronize();
    }
    return -1;
}

int main(int count, char** words) {
    const int error = count == 2 ? run(words[1]) : -1;
    printf("%d\n", error);
    return error != 0;
}
