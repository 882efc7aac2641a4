"""Layers of real networks on the CPU: each direction by every kernel that suits, and by PyTorch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cpu import native
from ece408_op.bench.cpu_timer import Sample, TorchPeer, elapsed_ms, interleaved, torch_contenders
from ece408_op.bench.summary import summary
from ece408_op.errors import UnsupportedProblem, WrongResult
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

# Of ResNet-50, VGG, AlexNet, MobileNetV2, ResNeXt, Inception v3 and a dilated network.
LAYERS = (
    "c3,h224,w224,m64,k7x7,s2x2,p3x3",
    "c64,h56,w56,m64,k1x1",
    "c64,h56,w56,m64,k3x3,p1x1",
    "c64,h56,w56,m256,k1x1",
    "c256,h56,w56,m64,k1x1",
    "c128,h28,w28,m128,k3x3,p1x1",
    "c128,h56,w56,m128,k3x3,s2x2,p1x1",
    "c256,h56,w56,m512,k1x1,s2x2",
    "c512,h28,w28,m128,k1x1",
    "c256,h14,w14,m256,k3x3,p1x1",
    "c1024,h14,w14,m256,k1x1",
    "c256,h14,w14,m1024,k1x1",
    "c512,h7,w7,m512,k3x3,p1x1",
    "c2048,h7,w7,m512,k1x1",
    "c64,h224,w224,m64,k3x3,p1x1",
    "c128,h112,w112,m128,k3x3,p1x1",
    "c512,h28,w28,m512,k3x3,p1x1",
    "c3,h224,w224,m64,k11x11,s4x4,p2x2",
    "c64,h27,w27,m192,k5x5,p2x2",
    "c32,h112,w112,m32,k3x3,p1x1,g32",
    "c144,h56,w56,m144,k3x3,s2x2,p1x1,g144",
    "c960,h7,w7,m960,k3x3,p1x1,g960",
    "c16,h112,w112,m96,k1x1",
    "c128,h56,w56,m128,k3x3,p1x1,g32",
    "c128,h17,w17,m128,k1x7,p0x3",
    "c256,h28,w28,m256,k3x3,p2x2,d2x2",
)
# Inputs and output of each direction, in the order of kernels/cpu/api/ece408.h.
_ARRAYS = {
    "forward": ("x", "w", "bias", "y"),
    "backward_data": ("w", "y", "x"),
    "backward_weight": ("x", "y", "w"),
}
# Relative L2 difference between two kernels' results from which on one of them is wrong.
_TOLERANCE = 1e-5
_LINE_BYTES = 64


def measure(
    problem: ConvProblem,
    peer: TorchPeer | None,
    samples: int,
    on_sample: Callable[[], None],
    directions: Sequence[str] = DIRECTIONS,
) -> dict[str, Any]:
    """By direction: the chosen kernel, and a summary of milliseconds for each kernel and layout.

    Arrays are warm and stay; kernels and PyTorch take turns. `on_sample` is called after each turn.
    Raises `WrongResult` where kernels disagree.
    """
    rng = np.random.default_rng(1)
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    arrays = {name: _room(shape) for name, shape in shapes.items()}
    for array in arrays.values():
        array[...] = rng.random(array.shape, "f") - np.float32(0.5)
    found = {}
    for direction in directions:
        chosen = native.choose(problem, direction, native.isas()[0])
        ours = _kernels(problem, direction, arrays, chosen)
        with torch_contenders(peer, problem, direction) as others:
            times = interleaved({**ours, **others}, samples, on_sample)
        ms = {name: summary(each) for name, each in times.items()}
        found[direction] = {"chosen": chosen, "ms": ms}
    return found


def _room(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array that begins with a cache line, as MXNet's and PyTorch's do. Large ones of
    numpy lie 16 bytes behind the start of one: loads of whole lines touch two.
    """
    nbytes = 4 * math.prod(shape)
    memory = np.empty(nbytes + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + nbytes].view(np.float32).reshape(shape)


def _kernels(
    problem: ConvProblem, direction: str, arrays: dict[str, np.ndarray], chosen: str
) -> dict[str, Sample]:
    """The kernels that compute a direction, the chosen one first, each checked against it."""
    *inputs, output = _ARRAYS[direction]
    out = _room(arrays[output].shape)
    addresses = [arrays[name].ctypes.data if name in arrays else None for name in inputs]

    def sample(kernel: str) -> Sample:
        return lambda: elapsed_ms(
            lambda: native.run(
                direction,
                problem,
                *addresses,
                out.ctypes.data,
                accumulate=False,
                threads=settings.threads(),
                isa=native.isas()[0],
                kernel=kernel,
            )
        )

    suiting: dict[str, Sample] = {}
    expected = None
    for kernel in (chosen, *(name for name in native.kernels() if name != chosen)):
        try:
            sample(kernel)()
        except UnsupportedProblem:
            continue
        expected = out.copy() if expected is None else expected
        error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
        if not error <= _TOLERANCE:
            raise WrongResult(
                f"{direction} of {problem}: {kernel} and {chosen} differ by {error:.1e}; not timed"
            )
        suiting[kernel] = sample(kernel)
    return suiting


def tables(layers: Sequence[dict[str, Any]]) -> str:
    """Everything as Markdown: a table for each direction and batch, and its geometric means."""
    parts = []
    for direction in (each for each in DIRECTIONS if each in layers[0]):
        for batch in dict.fromkeys(each["batch"] for each in layers):
            rows = [(e["layer"], e[direction]) for e in layers if e["batch"] == batch]
            parts += [f"## {direction}, batch {batch}", *_table(rows)]
    return "\n\n".join(parts)


def _table(rows: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, str]:
    titles = ["layer", "chosen kernel", "ms", "fastest kernel", "ms", "of it", "PyTorch, ms"]
    cells, shares, factors = [], [], []
    for layer, found in rows:
        kernels = {k: v["median"] for k, v in found["ms"].items() if not k.startswith("torch")}
        peers = [v["median"] for k, v in found["ms"].items() if k.startswith("torch")]
        chosen, fastest = found["chosen"], min(kernels, key=lambda name: kernels[name])
        shares.append(kernels[fastest] / kernels[chosen])
        factors += [min(peers) / kernels[chosen]] if peers else []
        cells.append(
            [
                *(f"`{layer}`", chosen, f"{kernels[chosen]:.2f}", fastest),
                *(f"{kernels[fastest]:.2f}", f"{shares[-1]:.2f}"),
                *((f"{min(peers):.2f}", f"{factors[-1]:.2f}") if peers else ("", "")),
            ]
        )
    means = f"Geometric means: the chosen kernel at {_mean(shares):.2f} of the fastest one's speed"
    if factors:
        means += f", {_mean(factors):.2f} times as fast as PyTorch (least {min(factors):.2f})"
    return markdown.table([*titles, "PyTorch / ours"], cells), means + "."


def _mean(factors: Sequence[float]) -> float:
    return statistics.geometric_mean(factors)
