// Calls into Python by this library, and by MXNet through it: not during signal delivery, which
// would lose the signal, and not after Python has ended.
#pragma once

#include <cxxabi.h>

namespace ece408 {

// One call into Python, for its lifetime. On the main thread it holds Python's lock and delays
// SIGINT.
class PythonCall {
public:
    PythonCall();
    ~PythonCall();
    PythonCall(const PythonCall&) = delete;

    // Whether Python may be called: not at the end of the process.
    explicit operator bool() const { return allowed_; }

private:
    bool allowed_, on_main_thread_;
    int python_lock_ = 0;
};

bool on_main_thread();
[[noreturn]] void sleep_for_ever();

// Runs a function that calls Python, on MXNet's threads, and returns its result; after Python has
// ended, returns 1, success, since nothing reads results any more.
template <typename Function>
int run_python(const Function& function) {
    const PythonCall call;
    if (!call) return 1;
    try {
        return function();
    } catch (abi::__forced_unwind&) {
        // Python has ended, and ends each thread that returns to it: MXNet's threads must not end.
        sleep_for_ever();
    }
}

// The same for the threads of MXNet's users, who need an answer: 0 for none after Python has ended.
// Python stops its own threads then, and so does this; they would only report errors.
template <typename Function>
int ask_python(const Function& function) {
    {
        const PythonCall call;
        if (call) return function();
    }
    if (!on_main_thread()) sleep_for_ever();
    return 0;
}

}  // namespace ece408
