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
from ..backends import kernel_file
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
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> None:
    path, scratch = arguments[0], Path(arguments[1])
    memory, requests, replies, number = map(int, arguments[2:])
    with open(requests) as lines, open(replies, "w", buffering=1) as answers:
        worker = _Worker(path, number)
        try:
            lacking = _prepare(kernel_file.find(path), scratch, memory) if path else []
        except Ece408Error as error:
            _answer(answers, _failure(error))
            return
        _answer(answers, {"lacking": lacking})
        for line in lines:
            _answer(answers, worker.answer(json.loads(line)))


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


class _Worker:
    """Computes as a layer of a network would: a request gives problem and arrays, the next one
    has the call made."""

    def __init__(self, path: str, number: int) -> None:
        self._layer = Layer(cuda_kernel=path) if path else Layer(backend="cpu")
        self._number = number
        self._mapped: list[Mapped] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for; what to reply."""
        try:
            if "problem" in request:
                self._set_up(request)
            elif "go" in request:
                x, w, y = (each.address for each in self._mapped)
                self._backend.forward(self._problem, x, w, None, y, False)
        except Ece408Error as error:
            return _failure(error)
        return {"done": True}

    def _set_up(self, request: dict[str, Any]) -> None:
        for each in self._mapped:
            each.close()
        self._mapped = []
        for role, (offset, nbytes) in zip(_ROLES, request["places"]):
            place = Place(offset, nbytes)
            self._mapped.append(Mapped(self._number, place, role != "y", request["margins"]))
        self._problem = ConvProblem.parse(request["problem"])
        self._backend = dispatch.select(self._problem, self._layer, "forward")
        self._backend.prepare(self._problem, "forward")


def _failure(error: Ece408Error) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error)}


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    # What the kernel printed comes before what is said of it.
    _libc.fflush(None)
    answers.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
