"""Which backend computes a call, and the call itself, timed for the log of op times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Callable

from . import op_log, settings
from .backends import Backend
from .backends.cpu import CpuBackend
from .backends.reference import ReferenceBackend
from .errors import InvalidSetting, UnsupportedProblem
from .problem import ConvProblem

_BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (CpuBackend(), ReferenceBackend())
}
# For arrays on a device: the backends that can reach them, the one to prefer first.
_BY_DEVICE = {"cpu": ("cpu", "reference")}


@dataclass(frozen=True)
class Layer:
    """Who is calling: the layer's name, where its arrays are, and the backend asked for."""

    name: str = ""
    device: str = "cpu"
    backend: str | None = None


def backend_names() -> tuple[str, ...]:
    """The names that `--backend`, ECE408_BACKEND and the operator's attribute can have."""
    return tuple(_BACKENDS)


def check_name(backend: str) -> None:
    """Raise `InvalidSetting` unless there is a backend of this name."""
    if backend not in _BACKENDS:
        raise InvalidSetting(
            f"unknown backend {backend!r}; choose one of {', '.join(backend_names())}"
        )


def check_settings() -> None:
    """Raise `InvalidSetting` or `InvalidSize` for a setting that the operator could not use."""
    backend = settings.backend()
    if backend is not None:
        check_name(backend)
    settings.isa()
    settings.threads()


def select(problem: ConvProblem, layer: Layer, direction: str) -> Backend:
    """The backend for one direction, "forward", "backward_data" or "backward_weight".

    A backend asked for, by the layer or in the settings, computes the forward pass or nothing
    does; for a gradient it lacks, the device's own backends stand in, and the log of op times
    says so.

    Raises `InvalidSetting` for an unknown name and `UnsupportedProblem` when none can compute it.
    """
    candidates = _BY_DEVICE.get(layer.device, ())
    requested = layer.backend or settings.backend()
    if requested is not None:
        check_name(requested)
        candidates = (requested,) if direction == "forward" else (requested, *candidates)
    reasons = []
    for name in candidates:
        reason = _BACKENDS[name].supports(problem, direction)
        if reason is None:
            return _BACKENDS[name]
        reasons.append(f"backend {name}: {reason}")
    if not candidates:
        reasons.append(f"no backend reaches arrays on {layer.device}; put them on mx.cpu()")
    raise UnsupportedProblem(f"cannot compute {direction} of {problem}; {'; '.join(reasons)}")


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
    problem: ConvProblem, layer: Layer, direction: str, call: Callable[[Backend], str]
) -> None:
    backend = select(problem, layer, direction)
    start = time.perf_counter()
    kernel = call(backend)
    seconds = time.perf_counter() - start
    op_log.publish(op_log.OpTime(layer.name, problem, direction, backend.name, kernel, seconds))
