"""Layers of real networks on a GPU: each direction by the chosen kernel, and by cuDNN."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernel_plan import Plan
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import launcher, pause
from ece408_op.backends.cuda.runtime.device import BEGIN, COMPUTED, Gpu
from ece408_op.bench import oracle, tune_targets
from ece408_op.bench.compiling import compile_all
from ece408_op.bench.peers.cudnn import Peer
from ece408_op.bench.summary import summary
from ece408_op.errors import WrongResult
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

_WARM_UP = 3
_PAUSE_US = 200
# cuDNN's, without TF32.
_VARIANTS = ("NCHW float32", "NHWC float32")
_ROLES = {
    "forward": ("y", "x", "w"),
    "backward_data": ("dx", "w", "dy"),
    "backward_weight": ("dw", "x", "dy"),
}
# Bytes of fresh random numbers; larger arrays repeat them.
_RANDOM_BYTES = 64 << 20
# Relative L2 error of an image from which on a result is wrong, by the kernel's precision.
_TOLERANCES = {"strict": 2e-6, "float32": 2e-6, "tf32": 1e-3, "float16": 2e-3}
# Multiply-adds of an image that the check's reference takes a second or so for.
_CHECKED_PRODUCTS = 2e9


def measure(
    gpu: Gpu,
    problem: ConvProblem,
    peer: Peer | None,
    samples: int,
    kernels: Sequence[str],
    directions: Sequence[str],
    on_direction: Callable[[], None],
) -> dict[str, Any]:
    """By direction: the chosen kernel, and a summary of milliseconds for it, for those of
    `kernels` that can compute it, and for cuDNN's layouts.

    Raises `WrongResult` where a result is wrong.
    """
    found = {}
    for direction in directions:
        plans = plans_of(gpu, problem, direction, kernels)
        with _arrays(gpu, problem, direction) as arrays:
            ms = {name: arrays.time(plan, samples) for name, plan in plans.items()}
            for name, plan in plans.items():
                arrays.check(name, plan)
        if peer is not None:
            for name, each in peer.measure(problem, samples, direction, _VARIANTS).items():
                ms[f"cudnn {name}"] = each.get("samples_ms", [math.inf])
        chosen = next(iter(plans))
        found[direction] = {"chosen": chosen, "ms": {n: summary(each) for n, each in ms.items()}}
        on_direction()
    return found


def plans_of(
    gpu: Gpu, problem: ConvProblem, direction: str, kernels: Sequence[str]
) -> dict[str, Plan]:
    """By kernel: first what a call without a kernel's name runs, then the named ones."""
    (chosen,) = work.example(problem, direction).plans(gpu, problem.batch)
    plans = {chosen.kernel.name: chosen}
    for name in kernels:
        kernel = catalog.get(name)
        if kernel.direction == direction and kernel.why_not(problem, gpu.capability) is None:
            plans.setdefault(name, kernel.plan(problem, gpu.capability, False))
    return plans


def layers_of(network: str) -> Counter[str]:
    """The layers of a network of `tune_targets.ZOO`, as texts, and how often each is there; without
    biases, which cuDNN's convolutions lack."""
    found = [
        dataclasses.replace(each, batch=1, bias=False) for each in tune_targets.layers(network)
    ]
    return Counter(str(each).partition(",")[2] for each in found)


def compile_seconds(gpu: Gpu, problem: ConvProblem, directions: Sequence[str]) -> float:
    """How long the chosen kernels take to compile, all at once, where nothing is in the cache."""
    plans = [
        plan for direction in directions for plan in plans_of(gpu, problem, direction, ()).values()
    ]
    with tempfile.TemporaryDirectory() as folder, settings.override(cache=folder):
        start = time.perf_counter()
        compile_all(gpu, plans)
        return time.perf_counter() - start


class _Arrays:
    """One direction's arrays on the GPU, with random numbers in +-0.5."""

    def __init__(
        self, gpu: Gpu, problem: ConvProblem, direction: str, pointers: Mapping[str, int]
    ) -> None:
        self._gpu, self._problem, self._direction = gpu, problem, direction
        self._pointers = dict(pointers)
        self._pause = pause.load(gpu, _PAUSE_US)
        rng = np.random.default_rng(408)
        for role in _ROLES[direction][1:]:
            nbytes = 4 * math.prod(work.shape_of(problem, role))
            block = rng.random(min(nbytes, _RANDOM_BYTES) // 4, np.float32) - np.float32(0.5)
            for first in range(0, nbytes, block.nbytes):
                part = block[: (nbytes - first) // 4]
                gpu.cuda.memcpy_htod(self._pointers[role] + first, part)

    def time(self, plan: Plan, samples: int) -> list[float]:
        """Milliseconds of each run."""
        loaded = launcher.load(self._gpu, plan)
        with loaded.lock, self._gpu.lane(plan.workspace_bytes) as lane:
            pointers = {**self._pointers, "workspace": lane.device}
            times = []
            for _ in range(_WARM_UP + samples):
                lane.launch(self._pause, {})
                lane.mark(BEGIN)
                lane.launch(loaded, pointers)
                lane.mark(COMPUTED)
                lane.wait()
                times.append(1e3 * lane.seconds(BEGIN, COMPUTED))
        return times[_WARM_UP:]

    def check(self, name: str, plan: Plan) -> None:
        """Compare what is there, or a run, with the reference: an image, or of gradients for w
        of small layers everything. Raises `WrongResult`."""
        output, *inputs = _ROLES[self._direction]
        problem = self._problem
        products = math.prod(problem.y_shape[1:]) * math.prod(problem.w_shape[1:])
        over_batch = output in work.OVER_BATCH
        if products * (1 if over_batch else problem.batch) > _CHECKED_PRODUCTS:
            return
        self.time(plan, 1)
        image = problem.batch - 1 if over_batch else None
        arrays = [self._read(role, image) for role in inputs]
        if over_batch:
            problem = dataclasses.replace(problem, batch=1)
        expected = {
            "forward": lambda: oracle.forward(problem, *arrays),
            "backward_data": lambda: oracle.backward_data(problem, *arrays),
            "backward_weight": lambda: oracle.backward_weight(problem, *arrays),
        }[self._direction]()
        found = self._read(output, image).astype(np.float64)
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        if not error <= _TOLERANCES[plan.kernel.exactness]:
            raise WrongResult(
                f"{self._direction} of {self._problem}: {name} is off by {error:.1e}; not timed"
            )

    def _read(self, role: str, image: int | None) -> np.ndarray:
        shape = work.shape_of(self._problem, role)
        offset = 0
        if image is not None and role in work.OVER_BATCH:
            shape = (1, *shape[1:])
            offset = image * 4 * math.prod(shape)
        array = np.empty(shape, np.float32)
        self._gpu.cuda.memcpy_dtoh(array, self._pointers[role] + offset)
        return array


@contextlib.contextmanager
def _arrays(gpu: Gpu, problem: ConvProblem, direction: str) -> Iterator[_Arrays]:
    with gpu.active(), contextlib.ExitStack() as lanes:
        pointers = {
            role: lanes.enter_context(gpu.lane(4 * math.prod(work.shape_of(problem, role)))).device
            for role in _ROLES[direction]
        }
        yield _Arrays(gpu, problem, direction, pointers)


def tables(layers: Sequence[dict[str, Any]]) -> str:
    """Everything as Markdown: a table for each direction and batch, and its geometric means."""
    batches = sorted({each["batch"] for each in layers})
    parts = []
    for direction in DIRECTIONS:
        for batch in batches:
            rows = [
                (each["layer"], each[direction])
                for each in layers
                if each["batch"] == batch and direction in each
            ]
            if rows:
                parts += [f"## {direction}, batch {batch}", *_table(rows, batch)]
    return "\n\n".join(parts)


def sums(
    layers: Sequence[dict[str, Any]], networks: Mapping[str, Mapping[str, int]]
) -> Sequence[str]:
    """A table of the networks whose layers have all been measured: for each batch and direction the
    milliseconds of all their convolutions, ours and cuDNN's."""
    rows = []
    for name, counts in networks.items():
        for batch in sorted({each["batch"] for each in layers}):
            by_layer = {each["layer"]: each for each in layers if each["batch"] == batch}
            for direction in DIRECTIONS:
                found = [
                    (count, times(by_layer[layer][direction]))
                    for layer, count in counts.items()
                    if direction in by_layer.get(layer, ())
                ]
                if len(found) == len(counts):
                    ours, peers = (sum(count * ms[who] for count, ms in found) for who in range(2))
                    factor = "" if math.isnan(peers) else f"{peers / ours:.2f}"
                    rows.append([name, batch, direction, f"{ours:.3f}", f"{peers:.3f}", factor])
    head = ["network", "batch", "direction", "ours, ms", "cuDNN, ms", "cuDNN / ours"]
    return ["## Sums of networks", markdown.table(head, rows)] if rows else []


def times(found: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of the chosen kernel, and of cuDNN's better layout, or NaN without it."""
    ms = {name: each["median"] for name, each in found["ms"].items()}
    peers = [each for name, each in ms.items() if name.startswith("cudnn")]
    return ms[found["chosen"]], min(peers, default=math.nan)


def _table(rows: Sequence[tuple[str, dict[str, Any]]], batch: int) -> Sequence[str]:
    cells, factors = [], []
    for layer, found in rows:
        ms = {name: each["median"] for name, each in found["ms"].items()}
        chosen = found["chosen"]
        _, peer = times(found)
        has_peer = not math.isnan(peer)
        others = [
            f"{name} {value:.3f}"
            for name, value in ms.items()
            if not name.startswith("cudnn") and name != chosen
        ]
        rate = 2e-9 * _products(layer) * batch / ms[chosen]
        factors += [peer / ms[chosen]] if has_peer else []
        cells.append(
            [
                *(f"`{layer}`", chosen, f"{ms[chosen]:.3f}", f"{rate:.0f}", "; ".join(others)),
                *((f"{peer:.3f}", f"{factors[-1]:.2f}") if has_peer else ("", "")),
            ]
        )
    head = ["layer", "kernel", "ms", "TFLOP/s", "others, ms", "cuDNN, ms", "cuDNN / ours"]
    table = markdown.table(head, cells)
    if not factors:
        return [table]
    mean = statistics.geometric_mean(factors)
    behind = sum(each < 1 for each in factors)
    return [table, f"Geometric mean {mean:.2f}, least {min(factors):.2f}, {behind} below 1."]


def _products(layer: str) -> int:
    """Multiply-adds of an image."""
    problem = ConvProblem.parse(f"b1,{layer}")
    return math.prod(problem.y_shape) * math.prod(problem.w_shape[1:])
