"""Op times of MXNet's own convolutions, from MXNet's profiler."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from .mxnet_recorder import MXNetRecorder

# The second is oneDNN's, with operators that MXNet fuses into it.
_CONVOLUTIONS = ("Convolution", "_sg_mkldnn_conv")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Record MXNet's operators within the block, and afterwards print the wall seconds of each call
    of a convolution to stderr, in order. MXNet must not have been imported."""
    recorder = MXNetRecorder()
    recorder.start()
    try:
        yield
    except BaseException:
        recorder.abandon()
        raise
    calls = [each for each in recorder.stop() if each.name in _CONVOLUTIONS]
    for each in sorted(calls, key=lambda call: call.start_ns):
        print(f"ece408: MXNet's convolution: {each.duration_ns / 1e9:.6f} s", file=sys.stderr)
    for note in recorder.notes:
        print(f"ece408: op times: {note}", file=sys.stderr)
