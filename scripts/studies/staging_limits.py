"""What limits staged calls: the bus, the host's copies, and the making of fresh memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cuda.backend import StagedBackend
from ece408_op.backends.cuda.runtime import device
from ece408_op.backends.cuda.runtime.device import Gpu
from ece408_op.bench import shapes
from ece408_op.bench.summary import summary
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

_SAMPLES = 5
_PART = 32 << 20
_WHOLE = 1 << 30
_SHAPES = ("fa19_1", "fa19_2")


@dataclass(frozen=True)
class Host:
    """What the host does: the figure's name, its unit, and the samples."""

    name: str
    unit: str
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Layer:
    """Milliseconds of staged forward passes: onto an output used before and onto fresh ones;
    within the median one on a used output, of copies over the bus. `floor` is what the bus takes
    for the larger direction at its measured rate."""

    name: str
    used: tuple[float, ...]
    fresh: tuple[float, ...]
    bus: float
    floor: float


def measure() -> tuple[list[Host], list[Layer]]:
    """Measure on the first GPU. Raises `NoUsableGpu` and what a staged call raises."""
    gpu = device.get(0)
    with gpu.active():
        host = [*_bus(gpu), *_copies(gpu), *_memory(), *_registration()]
    rates = {each.name: statistics.median(each.samples) for each in host}
    layers = [_layer(name, shapes.find(name), rates) for name in _SHAPES]
    return host, layers


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _rates(name: str, nbytes: int, function: Callable[[], object]) -> Host:
    """GB/s of a function that moves `nbytes` bytes; the first call warms up."""
    function()
    times = [_seconds(function) for _ in range(_SAMPLES)]
    return Host(name, "GB/s", tuple(1e-9 * nbytes / each for each in times))


def _bus(gpu: Gpu) -> Iterator[Host]:
    with gpu.lanes(1, _WHOLE >> 2, _WHOLE >> 2, _WHOLE) as (lane,):

        def move(copy: Callable[[int, int], None]) -> Callable[[], None]:
            def once() -> None:
                copy(0, _WHOLE >> 2)
                lane.wait()

            return once

        yield _rates("to the GPU", _WHOLE >> 2, move(lane.copy_in))
        yield _rates("from the GPU", _WHOLE >> 2, move(lane.copy_out))


def _copies(gpu: Gpu) -> Iterator[Host]:
    """Copies in parts, as staged calls make them, from page-locked memory to memory in use."""
    most = settings.threads()
    target = np.ones(_WHOLE, np.uint8)
    with gpu.lanes(1, 0, _PART, _WHOLE) as (lane,):
        for threads in dict.fromkeys([1, max(1, most // 2), most]):

            def once(threads: int = threads) -> None:
                for at in range(0, _WHOLE, _PART):
                    native.copy([(target.ctypes.data + at, lane.host, _PART)], threads)

            yield _rates(f"copies on the host, {threads} threads", _WHOLE, once)


def _memory() -> Iterator[Host]:
    """Fresh memory made in parts."""
    for name, huge in (("pages of 4 KiB", False), ("huge pages", True)):
        times = []
        for _ in range(_SAMPLES):
            with _Fresh(_WHOLE) as address:
                if huge:
                    native.ask_for_huge_pages(address, _WHOLE)
                making = functools.partial(native.populate, address, _WHOLE, settings.threads())
                times.append(_seconds(making))
        rates = tuple(1e-9 * _WHOLE / each for each in times)
        yield Host(f"making fresh memory, {name}", "GB/s", rates)


def _registration() -> Iterator[Host]:
    """Page-locking in place of memory that is there, and giving that up."""
    times = []
    for _ in range(_SAMPLES):
        with _Fresh(_WHOLE) as address:
            native.ask_for_huge_pages(address, _WHOLE)
            native.populate(address, _WHOLE, settings.threads())
            times.append(_register(address))
    for name, samples in zip(("page-locking in place", "unlocking"), zip(*times)):
        yield Host(name, "GB/s", tuple(1e-9 * _WHOLE / each for each in samples))


def _register(address: int) -> tuple[float, float]:
    """Seconds to page-lock so much memory and to unlock it."""
    driver = ctypes.CDLL("libcuda.so.1")
    start, size = ctypes.c_void_p(address), ctypes.c_size_t(_WHOLE)
    return (
        _seconds(lambda: driver.cuMemHostRegister_v2(start, size, 0)),
        _seconds(lambda: driver.cuMemHostUnregister(start)),
    )


class _Fresh:
    """Memory that was never written, `nbytes` bytes; the `with` block gets its address."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __enter__(self) -> int:
        self._view: Any = ctypes.c_char.from_buffer(self._memory)
        return ctypes.addressof(self._view)

    def __exit__(self, *error: object) -> None:
        del self._view
        self._memory.close()


def _layer(name: str, problem: ConvProblem, rates: dict[str, float]) -> Layer:
    x, w = (np.ones(shape, np.float32) for shape in (problem.x_shape, problem.w_shape))
    y = np.ones(problem.y_shape, np.float32)
    backend = StagedBackend()

    def run(address: int) -> tuple[float, float]:
        arguments = (problem, x.ctypes.data, w.ctypes.data, None, address, False)
        start = time.perf_counter()
        busy = backend.forward(*arguments).gpu
        seconds = time.perf_counter() - start
        return 1e3 * seconds, 1e3 * (busy.copy_seconds if busy else 0.0)

    run(y.ctypes.data)
    used = sorted(run(y.ctypes.data) for _ in range(_SAMPLES))
    fresh = []
    for _ in range(_SAMPLES):
        with _Fresh(y.nbytes) as address:
            fresh.append(run(address)[0])
    floor = max(x.nbytes / rates["to the GPU"], y.nbytes / rates["from the GPU"])
    bus = used[len(used) // 2][1]
    return Layer(name, tuple(ms for ms, _ in used), tuple(fresh), bus, 1e-6 * floor)


def table(host: Sequence[Host], layers: Sequence[Layer]) -> str:
    """Both as Markdown."""

    def times(name: str, floor: float, used: float, bus: str, fresh: float) -> list[str]:
        cells = [f"{ms:.1f} ({ms / floor:.2f}x)" for ms in (used, fresh)]
        return [name, f"{floor:.1f}", cells[0], bus, cells[1]]

    medians = [(statistics.median(each.used), statistics.median(each.fresh)) for each in layers]
    rows = [
        times(each.name, each.floor, used, f"{each.bus:.1f}", fresh)
        for each, (used, fresh) in zip(layers, medians)
    ]
    used, fresh = map(sum, zip(*medians))
    rows.append(times("together", sum(each.floor for each in layers), used, "", fresh))
    rates = [(each.name, f"{statistics.median(each.samples):.1f}") for each in host]
    head = ["layer", "floor", "output used before", "of these the bus", "fresh output"]
    parts = [
        "Medians. Staged forward passes at batch 10000, milliseconds; the floor is the larger "
        "direction at the bus's rate below:",
        markdown.table(head, rows),
        markdown.table(["what the machine does", "GB/s"], rates),
    ]
    return "\n\n".join(parts)


def document(host: Sequence[Host], layers: Sequence[Layer]) -> dict[str, Any]:
    """The same for JSON."""
    rates = [{**vars(each), "samples": summary(each.samples)} for each in host]
    times = [{**vars(e), "used": summary(e.used), "fresh": summary(e.fresh)} for e in layers]
    return {"host": rates, "layers": times}
