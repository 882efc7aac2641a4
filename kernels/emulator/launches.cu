// A source with launches that are planned elsewhere, and a launcher for each of its functions.
#include <cuda_runtime.h>

#include ECE408_SOURCE

#define ECE408_LAUNCH(function)                                                                   \
    extern "C" void ece408_launch_##function(const unsigned* sizes, size_t shared_bytes,          \
                                             void** arguments) {                                  \
        ece408_emulator::launch(#function, function, sizes, shared_bytes, arguments);             \
    }
ECE408_LAUNCHES
