"""How long kernel files take, beside this package's own CPU kernels.

All contenders take turns, in a random order, each in a process of its own; time is taken by this
process, from the request to the answer, less what asking takes by itself. Every timed call has
numbers that did not exist before, and an output full of NaN that is looked at afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import settings
from ..backends.cpu import native
from ..backends.kernel_file import KernelFile
from ..bench import ceilings, oracle
from ..errors import Ece408Error
from ..problem import ConvProblem
from .check import beyond_float32
from .session import Ended, Session

OURS = "ece408_op"
CALL_SECONDS = 300.0
# Images of each output that are compared.
_SAMPLED = 2
# A median whose middle half is wider than this is not steady.
STEADY = 0.02


@dataclass
class Timing:
    """One contender on one layer: seconds of each call, and why there are no more."""

    name: str
    layer: str
    problem: ConvProblem
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The width of the middle half of the calls, as a share of the median."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float((high - low) / self.median)


@functools.cache
def cpu_ceilings() -> ceilings.Ceilings:
    """What this machine itself can do, with the settings' threads."""
    return ceilings.measure(settings.isa() or native.isas()[0], settings.threads())


def measure(
    files: Sequence[KernelFile],
    layers: Sequence[tuple[str, ConvProblem]],
    rounds: int,
    progress: Callable[[], object] = lambda: None,
) -> list[Timing]:
    """Time CPU files on named problems, and our own kernels beside them.

    `progress` is called after each call: one to warm up and `rounds` for each contender and layer.
    A contender that fails is left out from there on. Raises `KernelCompileFailed`.
    """
    contenders: list[KernelFile | None] = [None, *files]
    with contextlib.ExitStack() as stack:
        sessions = {file: stack.enter_context(Session(file, CALL_SECONDS)) for file in contenders}
        idle = {file: session.idle_seconds() for file, session in sessions.items()}
        found = {
            (file, layer): Timing(file.name if file else OURS, layer, problem)
            for layer, problem in layers
            for file in contenders
        }
        for number in range(rounds + 1):
            order = list(found)
            random.SystemRandom().shuffle(order)
            for file, layer in order:
                timing = found[file, layer]
                if not timing.failure:
                    seconds = _call(sessions[file], timing)
                    # The first one only warms up.
                    if number and seconds is not None:
                        timing.seconds.append(max(seconds - idle[file], 1e-9))
                progress()
    return list(found.values())


def _call(session: Session, timing: Timing) -> float | None:
    """The seconds of a call, if it is right; if not, the timing says what is wrong."""
    rng = np.random.default_rng()
    x, w = (
        rng.random(shape, np.float32) - np.float32(0.5)
        for shape in (timing.problem.x_shape, timing.problem.w_shape)
    )
    try:
        y, seconds = session.timed(timing.problem, x, w)
    except (Ended, Ece408Error) as error:
        timing.failure = str(error)
        return None
    if np.isnan(y).any():
        timing.failure = "parts of the output are not written"
        return None
    one = dataclasses.replace(timing.problem, batch=1)
    for image in rng.integers(0, len(x), _SAMPLED):
        image_x, image_y = x[image : image + 1], y[image : image + 1]
        if beyond_float32(one, image_x, w, image_y, oracle.forward(one, image_x, w)).any():
            timing.failure = f"image {image} is wrong; ece408 lab check says more"
    return None if timing.failure else seconds
