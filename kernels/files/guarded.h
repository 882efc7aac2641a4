// Keeps exceptions of a kernel file's code as messages: no exception leaves a compiled file.
#pragma once

#include <stdexcept>
#include <string>

#include "../cpu/api/ece408.h"

namespace ece408_file {

std::string& message() {
    static thread_local std::string text;
    return text;
}

enum { FAILED = 4 };

// ECE408_OK, or FAILED if `compute` throws.
template <class Compute>
int guarded(Compute compute) {
    try {
        compute();
        return ECE408_OK;
    } catch (const std::exception& error) {
        message() = error.what();
    } catch (...) {
        message() = "an exception of a type of its own";
    }
    return FAILED;
}

}  // namespace ece408_file

// The exception of the file's code in this thread's last call that returned FAILED.
extern "C" ECE408_EXPORT const char* ece408_file_message(void) {
    return ece408_file::message().c_str();
}
