#include "python_calls.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <thread>

#include "callbacks.h"

// Python's stable interface, without its header, so that one library serves every Python 3.
extern "C" {
int PyErr_CheckSignals(void);
void PyErr_Fetch(PyObject** type, PyObject** value, PyObject** traceback);
void PyErr_Restore(PyObject* type, PyObject* value, PyObject* traceback);
int PyGILState_Ensure(void);
void PyGILState_Release(int state);
PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
PyObject* PyObject_GetAttrString(PyObject* object, const char* name);
int PyObject_IsTrue(PyObject* object);
int Py_AddPendingCall(int (*function)(void*), void* argument);
PyObject* Py_BuildValue(const char* format, ...);
void Py_DecRef(PyObject* object);
void Py_IncRef(PyObject* object);
}

namespace ece408 {

namespace {

using Seconds = std::chrono::duration<double>;

// At the end of the process: the time for work in flight, and for the rest of it afterwards.
constexpr Seconds kPatience{1}, kLastPatience{0.5};
constexpr std::chrono::milliseconds kGlance{1};

std::atomic<bool> ended{false};
std::atomic<int> calls{0};

// An exception of a signal's handler during a call from MXNet, which would have dropped it.
struct Kept {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    pid_t process = 0;
} kept;

void keep(PyObject* type, PyObject* value, PyObject* traceback) {
    Py_DecRef(kept.type), Py_DecRef(kept.value), Py_DecRef(kept.traceback);
    kept = {type, value, traceback, getpid()};
}

// Nested calls on the main thread.
int depth = 0;
bool puts_off = false;
struct sigaction python_handler;
std::atomic<bool> interrupted{false};

void note_interrupt(int) { interrupted = true; }

// Python calls it when it can next handle signals, and raises the exception.
int raise_kept(void*) {
    // Inside a call it would be lost again; the end of the call retries.
    if (depth > 0 || kept.type == nullptr) return 0;
    const Kept raised = kept;
    kept = {};
    // A child process inherits it from the parent, which the signal was for.
    if (raised.process != getpid()) return 0;
    PyErr_Restore(raised.type, raised.value, raised.traceback);
    return -1;
}

void put_off_signals() {
    if (depth++ > 0) return;
    sigaction(SIGINT, nullptr, &python_handler);
    puts_off = python_handler.sa_handler != SIG_DFL && python_handler.sa_handler != SIG_IGN;
    if (puts_off) {
        struct sigaction noting = {};
        noting.sa_handler = note_interrupt;
        noting.sa_flags = SA_RESTART | SA_ONSTACK;
        sigaction(SIGINT, &noting, nullptr);
    }
    // Earlier signals: Python would handle them at its next call.
    if (PyErr_CheckSignals() != 0) {
        Kept raised;
        PyErr_Fetch(&raised.type, &raised.value, &raised.traceback);
        keep(raised.type, raised.value, raised.traceback);
    }
}

void let_signals_through() {
    if (--depth > 0) return;
    if (puts_off) {
        struct sigaction now;
        sigaction(SIGINT, nullptr, &now);
        // A handler that ran meanwhile may have set another one.
        if (now.sa_handler == note_interrupt) sigaction(SIGINT, &python_handler, nullptr);
    }
    if (interrupted.exchange(false)) raise(SIGINT);
    if (kept.type != nullptr) Py_AddPendingCall(raise_kept, nullptr);
}

// Whether the work ends in time; otherwise it continues on its own thread.
template <typename Work>
bool ends_within(Seconds time, const Work& work) {
    auto task = std::make_shared<std::packaged_task<void()>>(work);
    auto end = task->get_future();
    try {
        std::thread([task] { (*task)(); }).detach();
    } catch (const std::exception&) {
        return false;
    }
    return end.wait_for(time) == std::future_status::ready;
}

void wait_for_calls() {
    while (calls > 0) std::this_thread::sleep_for(kGlance);
}

// Replaces the normal end of a process, in which MXNet would wait for its threads, or abort.
void end_at_once(int status, void*) {
    std::fflush(nullptr);
    _exit(status);
}

}  // namespace

// Python runs signal handlers on the main thread only.
bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

PythonCall::PythonCall() : on_main_thread_(on_main_thread()) {
    ++calls;
    allowed_ = !ended;
    if (allowed_ && on_main_thread_) {
        python_lock_ = PyGILState_Ensure();
        put_off_signals();
    }
}

PythonCall::~PythonCall() {
    if (allowed_ && on_main_thread_) {
        let_signals_through();
        PyGILState_Release(python_lock_);
    }
    --calls;
}

void sleep_for_ever() {
    for (;;) pause();
}

}  // namespace ece408

void ece408_before_fork(void (*action)(void)) {
    if (ece408::on_main_thread()) ece408::put_off_signals();
    action();
}

void ece408_after_fork_in_parent(void) {
    if (ece408::on_main_thread()) ece408::let_signals_through();
}

void ece408_after_fork_in_child(void) {
    using namespace ece408;
    calls = 0;
    if (depth > 0 && puts_off) sigaction(SIGINT, &python_handler, nullptr);
    depth = 0;
    interrupted = false;
}

PyObject* ece408_unraisable(PyObject* is_of_signal, PyObject* otherwise, PyObject* given) {
    using namespace ece408;
    PyObject* const answer = PyObject_CallFunctionObjArgs(is_of_signal, given, nullptr);
    if (answer == nullptr) return nullptr;
    const bool is_lost = on_main_thread() && PyObject_IsTrue(answer) == 1;
    Py_DecRef(answer);
    if (!is_lost) return PyObject_CallFunctionObjArgs(otherwise, given, nullptr);
    keep(PyObject_GetAttrString(given, "exc_type"), PyObject_GetAttrString(given, "exc_value"),
         PyObject_GetAttrString(given, "exc_traceback"));
    if (depth == 0) Py_AddPendingCall(raise_kept, nullptr);
    return Py_BuildValue("");
}

int ece408_end(int (*wait_for_all)(void), int (*notify_shutdown)(void), int has_others) {
    using namespace ece408;
    ends_within(kPatience, [=] { wait_for_all(); });
    ended = true;
    bool at_rest = ends_within(kLastPatience, wait_for_calls) && !has_others;
    // While this thread holds Python's lock, no other thread gives MXNet work, which would hang
    // after its shutdown.
    const int lock = PyGILState_Ensure();
    at_rest = at_rest && ends_within(kLastPatience, [=] { wait_for_all(), notify_shutdown(); });
    PyGILState_Release(lock);
    if (!at_rest) on_exit(end_at_once, nullptr);
    return at_rest;
}
