"""Optimizers' steps for all weights of a network on a GPU, in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from ..backends import as_array
from ..backends.cuda.kernel_plan import ARCHITECTURES, Code, Defines, Launch, Plan, divide_up
from .gpu_memory import Block, GpuMemory

CODE = Code("update", "network/update.cu", ARCHITECTURES, "float32", True)
Constants = Mapping[str, Union[float, None]]
# The constants of each rule.
_RULES = {
    "sgd": ("momentum",),
    "nag": ("momentum",),
    "adam": ("beta1", "beta2", "epsilon"),
    "adamw": ("beta1", "beta2", "epsilon", "eta"),
    "rmsprop": ("gamma1", "gamma2", "epsilon", "centered"),
    "lamb": ("beta1", "beta2", "epsilon", "bias_correction"),
}
_BOUNDS = {
    **dict.fromkeys(("clip_gradient", "clip_weights", "upper_bound"), math.inf),
    "lower_bound": -math.inf,
}
# The rest is as in the source.
_THREADS, _CHUNK, _SUMS_OF_CHUNK = 256, 4096, 16
_FLOATS = (
    *("rescale_grad", "clip_gradient", "momentum", "beta1", "beta2", "epsilon"),
    *("gamma1", "gamma2", "clip_weights", "eta", "lower_bound", "upper_bound"),
)
_CONSTANTS = np.dtype([*((name, "f4") for name in _FLOATS), ("arrays", "u4"), ("unused", "u4", 3)])
_SCALARS = ("count", "u4"), ("first", "u4"), ("lr", "f4"), ("wd", "f4"), ("corrections", "f4", 2)


class Item(NamedTuple):
    """An array of weights and its update.

    `weight`, `gradients` and `states`, which are in MXNet's order, are addresses on the GPU, of
    `elements` float32 each, aligned to 4 bytes. The gradients are added up in their order, and may
    be on GPUs that this one reaches. `lr` and `wd` are the learning rate and the weight
    decay of this step, with their multipliers, and `t` is its number, from 1 on.
    """

    weight: int
    gradients: tuple[int, ...]
    states: tuple[int, ...]
    elements: int
    lr: float
    wd: float
    t: int = 1


class Table(NamedTuple):
    """The updates of one step, as the kernels read them: `content`, which the host needs room for,
    and the numbers of arrays and of chunks. The GPU needs `nbytes`."""

    content: np.ndarray
    arrays: int
    chunks: int

    @property
    def nbytes(self) -> int:
        return self.content.nbytes + _SUMS_OF_CHUNK * self.chunks


class Updates:
    """Updates by one rule in one GPU's memory, which compute what MXNet's optimizers do on a CPU.

    `rule` is "sgd", "nag", "adam", "adamw" (as `nd.contrib.adamw_update`), "rmsprop" or "lamb".
    `constants` have the names of the optimizers' attributes; others are ignored. Bounds, such as
    "clip_gradient", are off where they are missing, `None` or not positive. Items have up to
    `gradients` of these.

    It and `run` require the machine's lock, and the machine active. Raises `KeyError` for another
    rule or a missing constant, and compiler errors.
    """

    def __init__(
        self, memory: GpuMemory, rule: str, constants: Constants, gradients: int = 1
    ) -> None:
        self._memory, self._rule, self._gradients = memory, rule, gradients
        # Where the GPU has the table with this content.
        self._block: Block | None = None
        self._sent = b""
        addresses = ("weight", "u8"), ("gradients", "u8", (gradients | 1,)), ("states", "u8", 3)
        self._array = np.dtype([*addresses, *_SCALARS])
        self._constants = _known(rule, constants)
        self.states = states_of(rule, self._constants)
        self._grids = 1, 1
        self._loaded = self._load(*self._grids)

    def have(self, constants: Constants) -> bool:
        """Return whether the constants, which users may change, are still these."""
        return self._constants == _known(self._rule, constants)

    def table(self, items: Sequence[Item], rescale_grad: float = 1) -> Table:
        """Return these updates as a table, of gradients times `rescale_grad`."""
        content = np.zeros(_CONSTANTS.itemsize + len(items) * self._array.itemsize, np.uint8)
        self._write(content, items, rescale_grad)
        # By this scale AdamW is told to skip a step whose gradients have overflowed.
        skips = self._rule == "adamw" and not (math.isfinite(rescale_grad) and rescale_grad)
        chunks = sum(divide_up(item.elements, _CHUNK) for item in items)
        return Table(content, len(items), 0 if skips else chunks)

    def run(self, table: Table) -> None:
        """Enqueue the updates after the work in progress on the memory's lane, which computes the
        gradients, and leave them in progress. Raises `NotEnoughMemory` and `GpuFailed`."""
        content, *grids = table
        if not table.chunks:
            return
        if self._grids != tuple(grids):
            self._loaded = self._load(*grids)
            self._grids = table.arrays, table.chunks
        memory, block = self._memory, self._block
        if block is None or block.nbytes != table.nbytes:
            block = self._block = memory.lend(table.nbytes, "training: an update")
            self._sent = b""
        start = block.address
        with memory.shared(content.nbytes) as (lane, at):
            if content.tobytes() != self._sent:
                as_array(lane.host + at, content.shape, "uint8")[:] = content
                lane.copy_in(start - lane.device, content.nbytes, lane.host + at)
                memory.is_shared_busy, self._sent = True, content.tobytes()
            pointers = {"constants": start, "arrays": start + _CONSTANTS.itemsize}
            lane.launch(self._loaded, {**pointers, "sums": start + content.nbytes})
            memory.is_busy = True
        if self._rule == "lamb":
            # Its kernels change the table.
            self._sent = b""

    def _load(self, arrays: int, chunks: int) -> Any:
        block, names = (_THREADS, 1, 1), ("constants", "arrays", "sums")
        launches = [Launch("update", (chunks, 1, 1), block, names)]
        if self._rule == "lamb":
            launches.append(Launch("scale", (arrays, 1, 1), block, names))
            launches.append(Launch("apply", (chunks, 1, 1), block, names[:2]))
        defines: Defines = (("RULE", self._rule.upper()), ("STATES", self.states))
        if self._gradients > 1:
            defines = (*defines, ("GRADIENTS", self._gradients))
        plan = Plan(CODE, defines, tuple(launches))
        return self._memory.machine.load([plan])[0]

    def _write(self, table: np.ndarray, items: Sequence[Item], rescale_grad: float) -> None:
        known = {**self._constants, "rescale_grad": rescale_grad}
        floats = (known.get(name, 0) for name in _FLOATS)
        head = table[: _CONSTANTS.itemsize].view(_CONSTANTS)
        head[0] = (*floats, len(items), (0, 0, 0))
        rows, first = [], 0
        for item in items:
            gradients = _padded(item.gradients, self._gradients | 1)
            states = _padded(item.states, 3)
            lr, corrections = self._scalars(item)
            scalars = (lr, item.wd, corrections)
            rows.append((item.weight, gradients, states, item.elements, first, *scalars))
            first += divide_up(item.elements, _CHUNK)
        table[_CONSTANTS.itemsize :].view(self._array)[:] = rows

    def _scalars(self, item: Item) -> tuple[float, tuple[float, float]]:
        """Return an item's learning rate, and the numbers that its averages are divided by."""
        betas = self._constants.get("beta1", 0), self._constants.get("beta2", 0)
        if self._rule == "adam":
            mean, variance = (1 - beta**item.t for beta in betas)
            return item.lr * math.sqrt(variance) / mean, (1, 1)
        corrects = self._constants.get("bias_correction")
        return item.lr, _corrections(*betas, item.t) if corrects else (1, 1)


def _padded(addresses: tuple[int, ...], count: int) -> tuple[int, ...]:
    return (*addresses, *(0,) * (count - len(addresses)))


@functools.lru_cache(maxsize=8)
def _corrections(beta1: float, beta2: float, t: int) -> tuple[float, float]:
    """Return LAMB's in float32, as MXNet computes them: far from exact in the first steps."""
    kept = np.array([beta1, beta2], np.float32) ** np.float32(t)
    mean, variance = (np.float32(1) - kept).tolist()
    return mean, variance


def _known(rule: str, constants: Constants) -> dict[str, float]:
    found = {name: constants[name] or 0 for name in _RULES[rule]}
    for name, off in _BOUNDS.items():
        bound = constants.get(name)
        found[name] = bound if bound and bound > 0 else off
    return found


def states_of(rule: str, constants: Constants) -> int:
    """Return the number of a rule's state arrays."""
    if rule in ("sgd", "nag"):
        return 1 if constants["momentum"] else 0
    if rule == "rmsprop":
        return 3 if constants["centered"] else 1
    return 2
