"""cuDNN through PyTorch, in a process of its own: reads problems, answers with times.

It runs under whichever Python has PyTorch, so it imports nothing of this package but `serve`. A
request has batch, channels, height, width, filters, kernel and samples; the answer is {variant:
{"samples_ms": [...], "error": ...} or {"failure": ...}}.
"""

from __future__ import annotations

from typing import Any

import torch
from serve import serve

WARM_UP = 3
CHECKED_IMAGES = 4
# Some 200 microseconds in which the GPU is busy while what is timed is enqueued, as for ours.
PAUSE_CYCLES = 400_000


def measure(request: dict[str, Any], channels_last: bool, tf32: bool) -> dict[str, Any]:
    """Times and the relative L2 error of one layout, with or without TF32."""
    torch.backends.cudnn.allow_tf32 = tf32
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = [request[key] for key in ("batch", "channels", "height", "width")]
    kernel = [request["filters"], request["channels"], *request["kernel"]]
    x = (torch.rand(shape, device="cuda") - 0.5).contiguous(memory_format=layout)
    w = (torch.rand(kernel, device="cuda") - 0.5).contiguous(memory_format=layout)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(WARM_UP + request["samples"]):
        torch.cuda._sleep(PAUSE_CYCLES)
        begin.record()
        y = torch.nn.functional.conv2d(x, w)
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end))
    few = x[-CHECKED_IMAGES:].double(), w.double()
    expected = torch.nn.functional.conv2d(*few)
    error = (y[-CHECKED_IMAGES:].double() - expected).norm() / expected.norm()
    return {"samples_ms": samples[WARM_UP:], "error": float(error)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Every layout with and without TF32."""
    answers = {}
    for channels_last in (False, True):
        for tf32 in (False, True):
            name = f"{'NHWC' if channels_last else 'NCHW'} {'tf32' if tf32 else 'float32'}"
            try:
                answers[name] = measure(request, channels_last, tf32)
            except RuntimeError as error:
                answers[name] = {"failure": str(error).splitlines()[0]}
            torch.cuda.empty_cache()
    return answers


def main() -> None:
    torch.backends.cudnn.benchmark = True
    serve({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}, answer)


if __name__ == "__main__":
    main()
