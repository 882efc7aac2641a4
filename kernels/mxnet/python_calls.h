// How this library, and MXNet through it, call Python: not halfway through a signal, which would be
// lost there, and not once Python has ended.
#pragma once

#include <cxxabi.h>

namespace ece408 {

// One call into Python, for as long as this lives. On the main thread it holds Python's lock and
// puts off SIGINT.
class PythonCall {
public:
    PythonCall();
    ~PythonCall();
    PythonCall(const PythonCall&) = delete;

    // Whether Python may be called: not when the process is about to end.
    explicit operator bool() const { return allowed_; }

private:
    bool allowed_, on_main_thread_;
    int python_lock_ = 0;
};

bool on_main_thread();
[[noreturn]] void sleep_for_ever();

// Runs what calls Python, on MXNet's threads, and returns its result; once Python has ended it
// returns 1, success, since nothing reads results any more.
template <typename Function>
int run_python(const Function& function) {
    const PythonCall call;
    if (!call) return 1;
    try {
        return function();
    } catch (abi::__forced_unwind&) {
        // Python has ended meanwhile, and ends each thread that comes back to it: MXNet's must not.
        sleep_for_ever();
    }
}

// The same for the threads of MXNet's users, who want an answer: once Python has ended, 0 for none.
// Python stops threads of its own then, and so does this; they would only complain.
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
