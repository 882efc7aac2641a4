"""Layers of networks on the CPU: each direction by every suitable kernel, and by PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
from collections.abc import Iterator

import numpy as np

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.bench import tune_targets
from ece408_op.bench.cpu_timer import Sample, TorchPeer, elapsed_ms, interleaved, torch_contenders
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.errors import InvalidProblem, InvalidSetting, UnsupportedProblem, WrongResult
from ece408_op.problem import ConvProblem

from .bench_request import Request

ABOUT = (
    "All calls use the same arrays; each call packs weights or reads them unpacked, as outside of "
    "networks. `kernel` is the chosen one."
)
# Inputs and output of each direction, in the order of kernels/cpu/api/ece408.h.
_ARRAYS = {
    "forward": ("x", "w", "bias", "y"),
    "backward_data": ("w", "y", "x"),
    "backward_weight": ("x", "y", "w"),
}
# If two kernels' results have a larger relative L2 difference, one of them is wrong.
_TOLERANCE = 1e-5
_LINE_BYTES = 64


def problems(request: Request) -> list[tuple[str, int, ConvProblem]]:
    """Return each layer with each batch: its text, the batch, and the problem without bias, as in
    cuDNN. A case is a layer, a name of `tune_targets` for several, or random:SEED:COUNT."""
    texts: dict[str, None] = {}
    for case in request.cases:
        if "," in case:
            texts[case] = None
            continue
        is_random = case.partition(":")[0] == "random"
        for each in _random(case) if is_random else tune_targets.layers(case):
            alone = str(dataclasses.replace(each, batch=1, bias=False))
            texts[alone.partition(",")[2]] = None
    return [(t, n, ConvProblem.parse(f"b{n},{t}")) for n in request.batches for t in texts]


def _random(case: str) -> Iterator[ConvProblem]:
    """Yield the random layers of random:SEED:COUNT, of all kinds: kernels up to 15x15 and along one
    axis, groups, strides, dilation. One image takes at most 2 MiB and a million to half a billion
    operations. Raises `InvalidSetting` for other text."""
    given = re.fullmatch(r"random:(\d+):(\d+)", case)
    if given is None:
        raise InvalidSetting(f"{case!r} names no layers; write random:SEED:COUNT, two numbers")
    rng, count = random.Random(int(given[1])), int(given[2])

    def between(least: int, most: int) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    while count:
        size = rng.choice((1, 3, 3, 3, 5, 7, rng.randint(2, 15)))
        kernel = rng.choice(((size, size), (size, size), (size, 1), (1, size), (size, 3)))
        height, groups = between(3, 112), rng.choice((1, 1, 1, between(2, 64)))
        channels, filters = (groups * between(1, 1500 // groups) for _ in range(2))
        if rng.random() < 0.1:
            groups = filters = channels
        width = rng.choice((height, height, between(1, 112)))
        pad = rng.choice((0, kernel[0] // 2)), rng.choice((0, kernel[1] // 2))
        stride, dilate = rng.choice((1, 1, between(1, 4))), rng.choice((1, 1, 1, 1, 2, 3))
        more = (filters, kernel, (stride, stride), pad, (dilate, dilate), groups)
        with contextlib.suppress(InvalidProblem):
            found = ConvProblem(1, channels, height, width, *more)
            most = max(math.prod(found.x_shape), math.prod(found.y_shape))
            if most <= 1 << 19 and 1e6 <= found.flops <= 5e8:
                count -= 1
                yield found


def rows(request: Request) -> Iterator[Row]:
    """Yield a row for each layer, batch and direction. Raises `WrongResult` if kernels disagree."""
    with request.peer("torch", TorchPeer) as peer:
        for text, batch, problem in problems(request):
            arrays = _inputs(problem)
            for direction in request.directions:
                chosen = native.choose(problem, direction, native.isas()[0])
                ours = _kernels(problem, direction, arrays, chosen)
                with torch_contenders(peer, problem, direction) as others:
                    times = interleaved({**ours, **others}, request.repeat)
                ms = {name: summary(each) for name, each in times.items()}
                about = {"case": text, "batch": batch, "direction": direction, "kernel": chosen}
                yield {**about, "ms": ms}


def _inputs(problem: ConvProblem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    arrays = {name: _room(shape) for name, shape in shapes.items()}
    for array in arrays.values():
        array[...] = rng.random(array.shape, "f") - np.float32(0.5)
    return arrays


def _room(shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array aligned to a cache line, as MXNet's and PyTorch's are. Large ones of
    NumPy start 16 bytes after a line's start, so that loads of whole lines touch two."""
    nbytes = 4 * math.prod(shape)
    memory = np.empty(nbytes + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + nbytes].view(np.float32).reshape(shape)


def _kernels(
    problem: ConvProblem, direction: str, arrays: dict[str, np.ndarray], chosen: str
) -> dict[str, Sample]:
    """Return the kernels that compute a direction, the chosen one first, each checked against
    it."""
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
        suiting[OURS if kernel == chosen else kernel] = sample(kernel)
    return suiting
