"""Dispatch of a call to a backend, with timing for the log of op times."""

from __future__ import annotations

import functools
import re
import sys
import time
from dataclasses import dataclass
from typing import Callable

from . import op_log, settings
from .backends import Backend, Done, kernel_file
from .backends.cpu.cpu_backend import CpuBackend
from .backends.cpu.cpu_file_backend import FileBackend
from .backends.cpu.reference import ReferenceBackend
from .backends.kernel_file import KernelFile
from .errors import InvalidSetting, NoUsableGpu, UnsupportedProblem
from .host import gpu
from .problem import ConvProblem


@dataclass(frozen=True)
class Layer:
    """The calling layer: its name, the device of its arrays, and its requests.

    Arrays are on the CPU, or on GPU number `index`. `backend`, `cuda_kernel`, `precision` and
    `gradient_precision` are names, or `None` for the settings' values.
    """

    name: str = ""
    device: str = "cpu"
    backend: str | None = None
    index: int = 0
    cuda_kernel: str | None = None
    precision: str | None = None
    gradient_precision: str | None = None

    def __str__(self) -> str:
        return f"{self.device}({self.index})" if self.device == "gpu" else self.device


# Constructors of a layer's backend, by the device of its arrays.
_BACKENDS: dict[str, dict[str, Callable[[Layer], Backend]]] = {
    "cpu": {
        "cpu": lambda layer: _cpu_backend(layer),
        "reference": lambda layer: ReferenceBackend(_is_strict(layer)),
        "cuda": lambda layer: _staged_backend(layer),
        "emulator": lambda layer: _emulator(layer),
    },
    "gpu": {
        "cuda": lambda layer: _zero_copy_backend(layer),
    },
}
# Other backends that run files for a device.
_EMULATING = {"cuda": ("emulator",)}
_OWN = tuple(_BACKENDS["cpu"])
# Default backends, in order of preference.
_DEFAULTS = {"cpu": ("cpu", "reference"), "gpu": ("cuda",)}
# The emulator's kernels: this package's faster ones need inline PTX.
_EMULATED_KERNEL, _EMULATED_STRICTLY = "general", "general_strict"


def _kernel(layer: Layer) -> str | None:
    return layer.cuda_kernel or settings.kernel()


def _kernel_file(layer: Layer) -> KernelFile | None:
    """Return the file whose kernel computes the layer forward, if any."""
    kernel = _kernel(layer)
    return kernel_file.find(kernel) if kernel and kernel_file.device_of(kernel) else None


def _cpu_backend(layer: Layer) -> Backend:
    file = _kernel_file(layer)
    if file is None or file.device != "cpu":
        return CpuBackend(*_precisions(layer))
    return FileBackend(file, _precisions(layer)[1])


# GPU code is imported only if used: it would take a third of the time of `import ece408_op`.


def _staged_backend(layer: Layer) -> Backend:
    file = _kernel_file(layer)
    if file is None or file.form == "declared":
        from .backends.cuda.cuda_backend import StagedBackend

        return StagedBackend(_kernel(layer), *_precisions(layer))
    from .backends.cuda.cuda_file_backend import StagedFileBackend

    return StagedFileBackend(file, _precisions(layer)[1])


def _zero_copy_backend(layer: Layer) -> Backend:
    file = _kernel_file(layer)
    if file is None or file.form == "declared":
        from .backends.cuda.cuda_backend import ZeroCopyBackend

        return ZeroCopyBackend(layer.index, _kernel(layer), *_precisions(layer))
    from .backends.cuda.cuda_file_backend import ZeroCopyFileBackend

    return ZeroCopyFileBackend(layer.index, file, _precisions(layer)[1])


def _emulator(layer: Layer) -> Backend:
    from .backends.emulator.emulator_backend import of_kernel
    from .backends.emulator.library import Emulation

    own = _EMULATED_STRICTLY if _is_strict(layer) else _EMULATED_KERNEL
    kernel = _kernel_file(layer) or _kernel(layer) or own
    return of_kernel(kernel, Emulation(settings.emulation()), _precisions(layer)[1])


@functools.lru_cache(maxsize=1)
def backend_of_cuda_files() -> str:
    """Return the backend of CUDA files for arrays on the CPU if none is requested: "cuda", or
    "emulator" without a GPU; the latter is printed to stderr once."""
    try:
        gpu.find_driver()
    except NoUsableGpu as error:
        reason = str(error).partition(";")[0]
        print(f"ece408: CUDA files are emulated on the CPU: {reason}", file=sys.stderr)
        return "emulator"
    return "cuda"


def _backend_of(file: KernelFile, layer: Layer) -> str:
    if file.device == "cuda" and layer.device == "cpu":
        return backend_of_cuda_files()
    return file.device


def _precisions(layer: Layer) -> tuple[str, str]:
    """Return the minimum precisions of the forward pass and of gradients.

    Gradients default to float32; those of a strict layer are strict.
    """
    forward = layer.precision or settings.precision()
    gradients = layer.gradient_precision or settings.gradient_precision()
    return forward, gradients or ("strict" if forward == "strict" else "float32")


def _is_strict(layer: Layer) -> bool:
    return _precisions(layer)[0] == "strict"


def register_backend(name: str, backend: Backend) -> None:
    """Register a backend for arrays on the CPU under a name, for the operator's attribute `backend`
    and ECE408_BACKEND.

    It replaces an earlier one of the same name. Raises `InvalidSetting` for the name of a backend
    of this package, for an invalid name, and for an object that is no `Backend`.
    """
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name in _OWN:
        raise InvalidSetting(
            f"{name!r} cannot be a backend's name; give letters and digits, and none of "
            f"{', '.join(_OWN)}"
        )
    if not isinstance(backend, Backend):
        raise InvalidSetting(
            f"backend {name} is a {type(backend).__name__}; give an object of a class that is "
            "derived from ece408_op.backends.Backend"
        )
    _BACKENDS["cpu"][name] = lambda layer: backend


def backend_names() -> tuple[str, ...]:
    """Return the valid names for `--backend`, ECE408_BACKEND and the operator's attribute."""
    return tuple(_BACKENDS["cpu"])


def check_name(backend: str) -> None:
    """Raise `InvalidSetting` unless a backend of this name exists."""
    if backend not in backend_names():
        raise InvalidSetting(
            f"unknown backend {backend!r}; choose one of {', '.join(backend_names())}"
        )


def check_names(backend: str | None = None, cuda_kernel: str | None = None) -> None:
    """Raise `InvalidSetting` unless a backend and a kernel of these names exist, and a file's
    kernel is for that backend; missing names are those of the settings."""
    backend = backend or settings.backend()
    if backend is not None:
        check_name(backend)
    kernel = cuda_kernel or settings.kernel()
    if kernel is None:
        return
    device = kernel_file.device_of(kernel)
    if device is not None and backend not in (None, device, *_EMULATING.get(device, ())):
        raise InvalidSetting(
            f"kernel file {kernel} is for backend {device}, not for backend {backend}"
        )
    if device is None or kernel_file.find(kernel).form == "declared":
        from .backends.cuda.work import forward_kernel

        forward_kernel(kernel)


def check_settings() -> None:
    """Raise `InvalidSetting` or `InvalidSize` for a setting that the operator cannot use."""
    check_names()
    settings.emulation()
    settings.isa()
    settings.threads()
    settings.devices()
    settings.precision()
    settings.gradient_precision()
    settings.gpu_memory()


def select(problem: ConvProblem, layer: Layer, direction: str) -> Backend:
    """Return the backend for one direction, "forward", "backward_data" or "backward_weight".

    A backend requested by the layer or in the settings is the only one for the forward pass; if it
    lacks a gradient, the device's own backends compute that, and the log of op times says so.

    Raises `InvalidSetting` for an unknown name and `UnsupportedProblem` when none can compute it.
    """
    reachable = _BACKENDS[layer.device]
    candidates = _DEFAULTS[layer.device]
    check_names(layer.backend, layer.cuda_kernel)
    file = _kernel_file(layer)
    requested = layer.backend or settings.backend() or (_backend_of(file, layer) if file else None)
    if requested is not None:
        candidates = (requested,) if direction == "forward" else (requested, *candidates)
    reasons = []
    for name in candidates:
        if name not in reachable:
            reasons.append(f"backend {name} does not reach arrays on {layer}")
            continue
        backend = reachable[name](layer)
        reason = backend.supports(problem, direction)
        if reason is None:
            return backend
        reasons.append(f"backend {name}: {reason}")
    raise UnsupportedProblem(f"cannot compute {direction} of {problem}; {'; '.join(reasons)}")


def prepare(problem: ConvProblem, layer: Layer, direction: str = "forward") -> Backend:
    """Return the backend of a direction, prepared for its first call.

    Raises what `forward` raises.
    """
    backend = select(problem, layer, direction)
    backend.prepare(problem, direction)
    return backend


def forward(
    problem: ConvProblem, layer: Layer, x: int, w: int, bias: int | None, y: int, accumulate: bool
) -> None:
    """Compute y, or add to it, from x, w and bias: addresses on the layer's device.

    Returns when y is complete. Raises what `select` raises, and the backend's errors.
    """
    _timed(
        problem,
        layer,
        "forward",
        lambda backend: backend.forward(problem, x, w, bias, y, accumulate),
    )


def backward_data(
    problem: ConvProblem, layer: Layer, w: int, dy: int, dx: int, accumulate: bool
) -> None:
    """Compute dx, the gradient for x, or add to it, from w and dy; otherwise as `forward`."""
    _timed(
        problem,
        layer,
        "backward_data",
        lambda backend: backend.backward_data(problem, w, dy, dx, accumulate),
    )


def backward_weight(
    problem: ConvProblem,
    layer: Layer,
    x: int,
    dy: int,
    dw: int | None,
    dbias: int | None,
    accumulate_w: bool,
    accumulate_bias: bool,
) -> None:
    """Compute dw and dbias, or add to them, each unless None, from x and dy; as `forward`."""
    _timed(
        problem,
        layer,
        "backward_weight",
        lambda backend: backend.backward_weight(
            problem, x, dy, dw, dbias, accumulate_w, accumulate_bias
        ),
    )


def _timed(
    problem: ConvProblem, layer: Layer, direction: str, call: Callable[[Backend], Done]
) -> None:
    backend = select(problem, layer, direction)
    start = time.perf_counter()
    done = call(backend)
    seconds = time.perf_counter() - start
    op_log.publish(
        op_log.OpTime(
            *(layer.name, problem, direction, backend.name),
            *(done.kernel, seconds, done.gpu, done.precision),
        )
    )
