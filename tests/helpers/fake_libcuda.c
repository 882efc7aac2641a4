/* CUDA's driver as far as this package calls it itself, without a GPU: it notes what it is told to
 * do, a line for each call, and fails where it is told to. Handles of functions are their names. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char notes[1 << 16];
static int error_of_launches;

static void note(const char* line) {
    if (strlen(notes) + strlen(line) + 2 < sizeof notes) strcat(strcat(notes, line), "\n");
}

const char* fake_notes(void) { return notes; }
void fake_forget(void) { notes[0] = 0; }
void fake_fail_launches(int error) { error_of_launches = error; }

int cuModuleLoadData(void** module, const void* image) {
    char line[64];
    snprintf(line, sizeof line, "load %.40s", (const char*)image);
    note(line);
    *module = (void*)0x1000;
    return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    if (module != (void*)0x1000) return 400;
    *function = strdup(name);
    return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
    char line[256];
    snprintf(line, sizeof line, "attribute %s %d %d", (char*)function, attribute, value);
    note(line);
    return 0;
}

int cuLaunchKernel(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                   unsigned int shared_bytes, void* stream, void** parameters, void** extra) {
    char line[2048];
    if (error_of_launches) return error_of_launches;
    if (parameters || extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4]) return 1;
    const unsigned char* const bytes = extra[1];
    const size_t size = *(size_t*)extra[3];
    int at = snprintf(line, sizeof line, "launch %s %u,%u,%u %u,%u,%u %u %llu ", (char*)function,
                      grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                      (unsigned long long)(uintptr_t)stream);
    for (size_t i = 0; i < size; i++) at += snprintf(line + at, sizeof line - at, "%02x", bytes[i]);
    note(line);
    return 0;
}

int cuStreamSynchronize(void* stream) {
    char line[64];
    snprintf(line, sizeof line, "wait %llu", (unsigned long long)(uintptr_t)stream);
    note(line);
    return 0;
}

int cuEventCreate(void** event, unsigned int flags) {
    *event = malloc(1);
    return (int)flags;
}

int cuEventRecord(void* event, void* stream) {
    char line[64];
    snprintf(line, sizeof line, "record %llu", (unsigned long long)(uintptr_t)stream);
    note(line);
    return event ? 0 : 1;
}

int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
    *milliseconds = 0.25f;
    return begin == end;
}

int cuEventDestroy_v2(void* event) {
    free(event);
    return 0;
}
