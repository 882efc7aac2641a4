// Errors of CUDA's runtime, with CUDA's numbers.
#pragma once

namespace ece408_emulator {

enum Error {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    MEMORY_ALLOCATION = 2,
    INVALID_CONFIGURATION = 9,
    INVALID_SYMBOL = 13,
    INVALID_DEVICE_POINTER = 17,
    INVALID_COPY_DIRECTION = 21,
    INVALID_DEVICE = 101,
    INVALID_RESOURCE = 400,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    ASSERTED = 710,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILURE = 719,
    NOT_SUPPORTED = 801,
};

}  // namespace ece408_emulator
