"""Server of cuDNN's times through PyTorch, in a separate process.

It runs under any Python that has PyTorch, so it imports only `serve` of this package. A request has
direction, batch, channels, height, width, filters, kernel, stride, pad, dilate, groups, samples,
and the variants, or null for all; the answer is {variant: {"samples_ms": [...], "error": ...} or
{"failure": ...}}. The error covers a few images of the forward pass only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from serve import serve

WARM_UP = 3
CHECKED_IMAGES = 4
# Keep the GPU busy for about 200 microseconds while the timed work is enqueued, as for our kernels.
PAUSE_CYCLES = 400_000


def measure(request: dict[str, Any], channels_last: bool, tf32: bool) -> dict[str, Any]:
    """Measure times and the relative L2 error of one layout, with or without TF32."""
    torch.backends.cudnn.allow_tf32 = tf32
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = [request[key] for key in ("batch", "channels", "height", "width")]
    kernel = [request["filters"], request["channels"] // request["groups"], *request["kernel"]]
    x = (torch.rand(shape, device="cuda") - 0.5).contiguous(memory_format=layout)
    w = (torch.rand(kernel, device="cuda") - 0.5).contiguous(memory_format=layout)
    run = computation(request, x, w)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(WARM_UP + request["samples"]):
        torch.cuda._sleep(PAUSE_CYCLES)
        begin.record()
        y = run()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end))
    found: dict[str, Any] = {"samples_ms": samples[WARM_UP:]}
    if request["direction"] == "forward":
        few = x[-CHECKED_IMAGES:].double(), w.double()
        expected = torch.nn.functional.conv2d(*few, None, *steps_of(request), request["groups"])
        error = (y[-CHECKED_IMAGES:].double() - expected).norm() / expected.norm()
        found["error"] = float(error)
    return found


def steps_of(request: dict[str, Any]) -> list[Any]:
    return [request[key] for key in ("stride", "pad", "dilate")]


def computation(
    request: dict[str, Any], x: torch.Tensor, w: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a function that computes the direction once."""
    steps, groups = steps_of(request), request["groups"]
    if request["direction"] == "forward":
        return lambda: torch.nn.functional.conv2d(x, w, None, *steps, groups)
    dy = torch.rand_like(torch.nn.functional.conv2d(x, w, None, *steps, groups)) - 0.5
    for_data = request["direction"] == "backward_data"
    wanted = (for_data, not for_data, False)
    return lambda: torch.ops.aten.convolution_backward(
        *(dy, x, w, None, *steps, False, [0, 0], groups), wanted
    )[0 if for_data else 1]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Measure every layout with and without TF32, or the requested variants."""
    answers: dict[str, Any] = {}
    for channels_last in (False, True):
        for tf32 in (False, True):
            name = f"{'NHWC' if channels_last else 'NCHW'} {'tf32' if tf32 else 'float32'}"
            if request["variants"] and name not in request["variants"]:
                continue
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
