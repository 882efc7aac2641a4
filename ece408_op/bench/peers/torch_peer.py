"""Server of the times of PyTorch's convolution on the CPU, in a separate process.

It runs under any Python that has PyTorch, so it imports only `serve` of this package. The request
{"shape": {"x": [...], "w": [...], "y": [...], "stride": [...], "pad": [...], "dilate": [...],
"groups": ...}} allocates inputs and is answered with {}, {"shape": null} frees them; {"run":
[layout, direction]} computes once and is answered with {"ms": ...}.

PyTorch allocates a new output for every call. The C library is told to keep freed memory, so that
PyTorch too is measured on touched memory.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch
from serve import serve

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = -1
# Gradients that a direction computes: for x, for w, for the bias.
_GRADIENTS = {
    "backward": (True, True, False),
    "backward_data": (True, False, False),
    "backward_weight": (False, True, False),
}
_LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory; return whether it accepted."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, _NEVER))


class Inputs:
    """Random arrays of one shape in every layout, made when a layout is first used."""

    def __init__(self, shape: dict[str, Any]) -> None:
        self._shape = shape
        self.steps = [shape[name] for name in ("stride", "pad", "dilate")]
        self.groups = shape["groups"]
        self._made: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(self, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if layout not in self._made:
            self._made[layout] = self._make(_LAYOUTS[layout])
        return self._made[layout]

    def _make(self, layout: torch.memory_format) -> tuple[torch.Tensor, ...]:
        sizes = (self._shape["x"], self._shape["w"], self._shape["y"])
        x, w, dy = (torch.rand(size).contiguous(memory_format=layout) for size in sizes)
        return x, w, dy


def compute(inputs: Inputs, layout: str, direction: str) -> float:
    """Return the milliseconds of one pass."""
    x, w, dy = inputs.of(layout)
    start = time.perf_counter()
    if direction == "forward":
        torch.nn.functional.conv2d(x, w, None, *inputs.steps, inputs.groups)
    else:
        torch.ops.aten.convolution_backward(
            *(dy, x, w, None, *inputs.steps, False, [0, 0], inputs.groups), _GRADIENTS[direction]
        )
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    kept = keep_freed_memory()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    inputs: Inputs | None = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal inputs
        if "shape" in request:
            inputs = None
            inputs = Inputs(request["shape"]) if request["shape"] else None
            return {}
        assert inputs is not None
        return {"ms": compute(inputs, *request["run"])}

    serve({"torch": torch.__version__, "keeps_memory": kept}, answer)


if __name__ == "__main__":
    main()
