"""An emulated GPU that compiles the kernels of many networks together.

Most of a compiler's time for a kernel is start-up, headers and linking: a hundred kernels in one
file take a tenth of the time of a hundred files.
"""

import functools
import re
import tempfile
import threading
from pathlib import Path

from ece408_op.backends.emulator import emulator_compiler, library, plans
from ece408_op.errors import KernelCompileFailed
from ece408_op.files.resources import cuda_folders, kernels_dir
from ece408_op.network.machines.emulated import EmulatedMachine

# Headers of kernels; they cannot be included within a namespace.
_HEADERS = (
    *("cuda_runtime.h", "cuda_fp16.h", "cuda_pipeline.h", "cooperative_groups.h", "mma.h"),
    "stdint.h",
)
_OWN_HEADER = re.compile(r'^ *# *include "([^"]+)"', re.M)
_OTHERS_HEADER = re.compile(r"^ *# *include <[^>]+>|^ *# *pragma once", re.M)
_MACRO = re.compile(r"^ *# *define (\w+)", re.M)


class _Kernel:
    """A plan's kernel in a library of many, once that is compiled."""

    def __init__(self, plan):
        self.plan, self.number = plan, 0
        self.library = self.failure = None

    def __getattr__(self, name):
        return getattr(self.library, name)

    def __getitem__(self, name):
        return self.library[f"{name}_{self.number}"]


class _Loaded:
    def __init__(self, plan, kernel):
        self.plan, self._kernel = plan, kernel

    def launch(self, pointers):
        if self._kernel.failure is not None:
            raise self._kernel.failure
        if self._kernel.library is not None:
            plans.run(self.plan, self._kernel, pointers)


class MachineOfMany(EmulatedMachine):
    """An emulated GPU whose kernels do nothing until `compile` is called."""

    def __init__(self, mode):
        super().__init__(mode)
        self._mode = mode
        self._kernels = {}
        self._waiting = []

    def load(self, plans):
        return [_Loaded(plan, self._kernel(plan)) for plan in plans]

    def _kernel(self, plan):
        key = plan.kernel.source, plan.macros, _functions(plan)
        if key not in self._kernels:
            self._kernels[key] = _Kernel(plan)
            self._waiting.append(self._kernels[key])
        return self._kernels[key]

    def compile(self):
        """Compile all kernels loaded so far, so that they compute from now on; raise their error,
        if any."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._compile(waiting)

    def _compile(self, kernels):
        for number, kernel in enumerate(kernels):
            kernel.number = number
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "kernels.cu"
                path.write_text(_source(kernels), encoding="utf-8")
                found = library.load(emulator_compiler.program(path, self._mode))
        except KernelCompileFailed as error:
            if len(kernels) == 1:
                kernels[0].failure = error
                return
            for half in kernels[::2], kernels[1::2]:
                self._compile(half)
            return
        for kernel in kernels:
            kernel.library = found


class MachineAtOnce(MachineOfMany):
    """An emulated GPU that compiles a network's new kernels together as it loads them."""

    def load(self, plans):
        loaded = super().load(plans)
        self.compile()
        return loaded


@functools.cache
def machine(mode):
    """Return the machine of all networks of this process, which have kernels in common."""
    return MachineAtOnce(mode)


class _OneOfSeveral(MachineAtOnce):
    """One of several emulated GPUs. They have kernels in common, and work one at a time. Counts its
    recordings, and knows its `own` addresses."""

    can_reach = True

    def __init__(self, number, lock):
        super().__init__("fast")
        self.key, self.lock = (*self.key, number), lock
        self._kernels = machine("fast")._kernels
        self.recorded, self.own = 0, set()

    def reaches(self, other):
        return self.can_reach or other is self

    def allocate(self, nbytes):
        address = super().allocate(nbytes)
        self.own.add(address)
        return address

    def free(self, address):
        super().free(address)
        self.own.remove(address)

    def record(self, lane, runs):
        self.recorded += 1
        return super().record(lane, runs)


@functools.cache
def several(count):
    """Return emulated GPUs, any of which one thread can use at the same time."""
    lock = threading.RLock()
    return [_OneOfSeveral(number, lock) for number in range(count)]


def _functions(plan):
    return tuple(dict.fromkeys(launch.function for launch in plan.launches))


def _source(kernels):
    """Return each kernel in a namespace, followed by #undef of its macros."""
    # On such small arrays optimising takes longer than running slow code.
    parts = ['#pragma GCC optimize("O0")\n', *(f"#include <{name}>\n" for name in _HEADERS)]
    for kernel in kernels:
        text, space = _text(kernel.plan.kernel.source), f"of_{kernel.number}"
        parts += [f"#define {name} {value}\n" for name, value in kernel.plan.macros]
        parts += [f"namespace {space} {{\n{text}\n}}\n"]
        names = {re.match(r"\w+", name)[0] for name, _ in kernel.plan.macros}
        parts += [f"#undef {name}\n" for name in sorted(names | set(_MACRO.findall(text)))]
        for function in _functions(kernel.plan):
            parts.append(
                f'extern "C" void ece408_launch_{function}_{kernel.number}('
                "const unsigned *sizes, size_t shared_bytes, void **arguments) {\n"
                f'    ece408_emulator::launch("{function}", {space}::{function}, sizes,'
                " shared_bytes, arguments);\n}\n"
            )
    return "".join(parts)


@functools.cache
def _text(name):
    """Return a source with its own headers in it, each once, without those of other sources."""
    headers = {path.name: path for folder in cuda_folders() for path in folder.iterdir()}
    seen = set()

    def whole(path):
        if path in seen:
            return ""
        seen.add(path)
        return _OWN_HEADER.sub(lambda match: whole(headers[match[1]]), path.read_text())

    # C functions of the same name are the same function.
    return _OTHERS_HEADER.sub("", whole(kernels_dir() / "cuda" / name)).replace('extern "C" ', "")
