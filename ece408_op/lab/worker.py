"""The process that runs a kernel file: compiles it, gives up what a kernel has no need of, and
then does what it is asked to, a line of JSON for each call.

    python -m ece408_op.lab.worker FILE SCRATCH BYTES REQUESTS REPLIES ARRAYS

BYTES is the most memory that it may take, the last three are descriptors. What the kernel prints
goes to standard output and error.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from .. import dispatch, settings
from ..backends import Backend, kernel_file
from ..backends.cpu import compiled_file
from ..backends.cuda import file_backend
from ..backends.cuda.runtime import device
from ..backends.kernel_file import KernelFile
from ..dispatch import Layer
from ..errors import Ece408Error
from ..problem import ConvProblem
from . import sandbox
from .arrays import Mapped, Place

_ROLES = ("x", "w", "y")


def main(arguments: list[str]) -> None:
    path, scratch = arguments[0], Path(arguments[1])
    memory, requests, replies, number = map(int, arguments[2:])
    with open(requests) as lines, open(replies, "w", buffering=1) as answers:
        try:
            lacking = _prepare(kernel_file.find(path), scratch, memory)
        except Ece408Error as error:
            _answer(answers, {"error": type(error).__name__, "text": str(error)})
            return
        _answer(answers, {"lacking": lacking})
        for line in lines:
            _answer(answers, _call(path, json.loads(line), number))


def _prepare(file: KernelFile, scratch: Path, memory: int) -> list[str]:
    """Compile the file, while that is still possible, and isolate this process; returns what
    `sandbox.isolate` returns."""
    limits = sandbox.Limits(memory)
    if file.device == "cpu":
        compiled_file.library(file)
    else:
        gpu = device.get(settings.devices()[0])
        # CUDA maps all of the machine's memory and the GPU's.
        limits = dataclasses.replace(limits, memory=0)
        if file.form == "declared":
            # Nothing of it runs on the host, and nvcc compiles it for each layer.
            return []
        file_backend.library(file, gpu.capability)
    return sandbox.isolate(scratch, limits, sockets=file.device == "cuda")


def _call(path: str, request: dict[str, Any], number: int) -> dict[str, Any]:
    """Compute y of a problem, as a layer of a network would."""
    problem = ConvProblem.parse(request["problem"])
    mapped: list[Mapped] = []
    try:
        for role, (offset, nbytes) in zip(_ROLES, request["places"]):
            margins = request["margins"]
            mapped.append(Mapped(number, Place(offset, nbytes), role != "y", margins))
        backend = _backend(path, problem)
        if request.get("prepare"):
            backend.prepare(problem, "forward")
        else:
            x, w, y = (each.address for each in mapped)
            backend.forward(problem, x, w, None, y, False)
    except Ece408Error as error:
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        for each in mapped:
            each.close()
    return {"done": True}


def _backend(path: str, problem: ConvProblem) -> Backend:
    return dispatch.select(problem, Layer(cuda_kernel=path), "forward")


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    # What the kernel printed comes before what is said of it.
    ctypes.CDLL(None).fflush(None)
    answers.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
