"""Timing of the CPU kernels beside MXNet's Convolution and PyTorch's, interleaved in one run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import settings
from ..errors import WrongResult, surfaced
from ..op_log import op_times
from ..operator.graphs.graph_json import OP_TYPE
from ..operator.loading import load_mxnet
from ..problem import ConvProblem
from . import oracle
from .peers import process

_CHECKED_IMAGES = 3
_REST_S = 0.01
WARM_UP = 2
# Results with a larger relative L2 error against float64 are wrong.
TOLERANCE = 1e-6

Sample = Callable[[], float]


class TorchPeer(process.Peer):
    """PyTorch in a separate process, under a Python that has it; torch_peer.py documents the
    requests."""

    program = "torch_peer.py"


def elapsed_ms(function: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


@dataclasses.dataclass
class Bound:
    """A convolution bound by MXNet with its arrays: all calls write the same outputs."""

    executor: Any
    dy: Any

    def forward(self) -> float:
        def run() -> None:
            self.executor.forward(is_train=False)
            self.executor.outputs[0].wait_to_read()

        return elapsed_ms(run)

    def forward_with(self, **values: Any) -> Sample:
        """Return a function that times the forward pass under these settings."""

        def sample() -> float:
            with settings.override(**values):
                return self.forward()

        return sample

    def backward(self) -> float:
        """Time both gradients, without the forward pass that MXNet requires first."""
        self.executor.forward(is_train=True)
        self.executor.outputs[0].wait_to_read()

        def run() -> None:
            self.executor.backward([self.dy])
            for gradient in self.executor.grad_arrays:
                gradient.wait_to_read()

        return elapsed_ms(run)


def bind(problem: ConvProblem, x: Any, w: Any, ours: bool, gradients: bool = False) -> Bound:
    """Bind the operator alone in an executor, without protection against blocked layouts."""
    mx = load_mxnet()
    data, weight = mx.sym.Variable("x"), mx.sym.Variable("w")
    attributes = {
        "kernel": problem.kernel,
        "stride": problem.stride,
        "pad": problem.pad,
        "dilate": problem.dilate,
        "num_group": problem.groups,
        "num_filter": problem.filters,
        "no_bias": True,
    }
    if ours:
        symbol = mx.sym.Custom(data, weight, op_type=OP_TYPE, **attributes)
    else:
        symbol = mx.sym.Convolution(data, weight, **attributes)
    request = "write" if gradients else "null"
    found = {"x": mx.nd.empty(x.shape), "w": mx.nd.empty(w.shape)} if gradients else None
    executor = symbol.bind(mx.cpu(), {"x": x, "w": w}, args_grad=found, grad_req=request)
    dy = mx.nd.array(np.random.default_rng(2).random(problem.y_shape, "f")) if gradients else None
    return Bound(executor, dy)


def inputs(problem: ConvProblem) -> tuple[Any, Any]:
    """Return random x and w as NDArrays, in [-0.5, 0.5)."""
    mx = load_mxnet()
    rng = np.random.default_rng(1)
    return tuple(
        mx.nd.array(rng.random(shape, "f") - np.float32(0.5))
        for shape in (problem.x_shape, problem.w_shape)
    )


def check(problem: ConvProblem, x: Any, w: Any, y: Any) -> float:
    """Return the relative L2 error of the first, the middle and the last image against float64.

    Raises `WrongResult` above `TOLERANCE`, or if a sampled output is not finite.
    """
    images = sorted({0, problem.batch // 2, problem.batch - 1})[:_CHECKED_IMAGES]
    few = dataclasses.replace(problem, batch=len(images))
    some = np.concatenate([x[i : i + 1].asnumpy() for i in images])
    found = np.concatenate([y[i : i + 1].asnumpy() for i in images])
    expected = oracle.forward(few, some, w.asnumpy())
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not error <= TOLERANCE:
        raise WrongResult(f"{problem} has a relative error of {error:.1e}; not timed")
    return error


def interleaved(contenders: Mapping[str, Sample], samples: int) -> dict[str, list[float]]:
    """Return `samples` times in ms of each contender, taken in turns after a warm-up. A rest before
    each lets the previous one's threads stop spinning. Every second turn is in reverse order, so
    that no contender always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-WARM_UP, samples):
        for name, sample in list(contenders.items())[:: -1 if turn % 2 else 1]:
            time.sleep(_REST_S)
            elapsed = sample()
            if turn >= 0:
                times[name].append(elapsed)
    return times


@contextmanager
def torch_contenders(
    peer: TorchPeer | None, problem: ConvProblem, direction: str
) -> Iterator[dict[str, Sample]]:
    """Yield PyTorch's samplers by layout, of `DIRECTIONS` or "backward" (both gradients); none
    without a peer. Its arrays are freed at the end of the `with` block."""
    if peer is None:
        yield {}
        return
    sizes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    steps = {name: getattr(problem, name) for name in ("stride", "pad", "dilate", "groups")}

    def sample(layout: str) -> Sample:
        return lambda: peer.ask(run=[layout, direction])["ms"]

    peer.ask(shape={**sizes, **steps})
    try:
        yield {f"torch {layout}": sample(layout) for layout in ("NCHW", "NHWC")}
    finally:
        peer.ask(shape=None)


def by_isa(
    problem: ConvProblem, isas: tuple[str, ...], torch: TorchPeer | None, samples: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return milliseconds of the forward pass, by the textbook loops ("reference", once),
    instruction set, "mxnet" and PyTorch's layouts; and the kernels by instruction set. Results are
    checked (`WrongResult`)."""
    x, w = inputs(problem)
    ours, native = (bind(problem, x, w, ours=own) for own in (True, False))
    contenders = {isa: ours.forward_with(isa=isa) for isa in isas}
    others = torch_contenders(torch, problem, "forward")
    with surfaced(), op_times() as log, others as by_torch:
        for sample in contenders.values():
            ours.executor.outputs[0][:] = float("nan")
            sample()
            check(problem, x, w, ours.executor.outputs[0])
        names = dict(zip(isas, (entry.kernel for entry in log)))
        reference = [ours.forward_with(backend="reference")()]
        contenders.update({"mxnet": native.forward, **by_torch})
        times = interleaved(contenders, samples)
    return {"reference": reference, **times}, names
