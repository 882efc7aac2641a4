"""Ctrl-C while MXNet computes."""

# The signal is delivered to the working thread, so it does not wake the main one.
CODE = """
import signal, threading, time
from ece408_op.host.interruptible import run_interruptibly

def work():
    time.sleep(0.5)  # until the main thread waits
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)
begin = time.monotonic()
try:
    run_interruptibly(work)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begin < 30)
"""


def test_a_signal_that_does_not_wake_the_main_thread_is_handled(run_python):
    assert run_python(CODE).stdout == "interrupted True\n"
