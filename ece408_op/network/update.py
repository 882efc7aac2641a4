"""Optimizers' steps for all weights of a network on a GPU, in one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from ..backends import as_array
from ..backends.cuda.kernel_plan import ARCHITECTURES, Code, Launch, Plan, divide_up
from .machines.machine import GpuMachine

CODE = Code("update", "network/update.cu", ARCHITECTURES, "float32", True)
Constants = Mapping[str, Union[float, None]]
# Each rule of the source: the number of state arrays, and its constants.
_RULES = {
    "sgd": (0, ()),
    "sgd_momentum": (1, ("momentum",)),
    "nag": (1, ("momentum",)),
    "adam": (2, ("beta1", "beta2", "epsilon")),
    "adamw": (2, ("beta1", "beta2", "epsilon", "eta")),
    "rmsprop": (1, ("gamma1", "epsilon")),
    "rmsprop_centered": (3, ("gamma1", "gamma2", "epsilon")),
    "lamb": (2, ("beta1", "beta2", "epsilon", "bias_correction")),
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
_ARRAY = np.dtype(
    [
        *(("weight", "u8"), ("gradient", "u8"), ("states", "u8", 3)),
        *(("count", "u4"), ("first", "u4"), ("lr", "f4"), ("wd", "f4"), ("corrections", "f4", 2)),
    ]
)


class Item(NamedTuple):
    """An array of weights and its update.

    `weight`, `gradient` and `states`, which are in MXNet's order, are addresses on the GPU of
    `elements` float32, aligned to 4 bytes. `lr` and `wd` are the learning rate and the weight decay
    of this step, with MXNet's multipliers, and `t` is its number, from 1 on.
    """

    weight: int
    gradient: int
    states: tuple[int, ...]
    elements: int
    lr: float
    wd: float
    t: int = 1


def room(items: Sequence[Item]) -> tuple[int, int]:
    """Return the bytes on the GPU and on the host that `Updates.run` needs."""
    table = _CONSTANTS.itemsize + len(items) * _ARRAY.itemsize
    return table + _SUMS_OF_CHUNK * _chunks(items), table


class Updates:
    """Updates by one rule on one GPU, which compute what MXNet's optimizers compute on a CPU.

    `rule` is "sgd", "nag", "adam", "adamw" (as `nd.contrib.adamw_update`), "rmsprop" or "lamb".
    `constants` have the names of the optimizers' attributes; others are ignored. Bounds, such as
    "clip_gradient", are off where they are missing, `None` or not positive.
    `states` is the number of state arrays.

    All methods require the machine's lock, and the machine active. Raises `KeyError` for another
    rule or a missing constant, and compiler errors.
    """

    def __init__(self, machine: GpuMachine, rule: str, constants: Constants) -> None:
        self._machine = machine
        self._rule = _variant(rule, constants)
        self.states, names = _RULES[self._rule]
        self._constants = {name: constants[name] or 0 for name in names}
        for name, off in _BOUNDS.items():
            bound = constants.get(name)
            self._constants[name] = bound if bound and bound > 0 else off
        self._arrays = self._chunks = 1
        self._loaded = self._load()

    def run(self, lane: Any, items: Sequence[Item], rescale_grad: float = 1, at: int = 0) -> None:
        """Enqueue the updates on a lane, on whose first stream gradients must be complete.

        Uses `room(items)` bytes of the lane's memory from `at`, a multiple of 16, until the lane's
        work is done: wait for it before the next call. Raises `GpuFailed`.
        """
        chunks = _chunks(items)
        # By this scale AdamW is told to skip a step whose gradients have overflowed.
        skips = self._rule == "adamw" and not (math.isfinite(rescale_grad) and rescale_grad)
        if not chunks or skips:
            return
        if (self._arrays, self._chunks) != (len(items), chunks):
            self._arrays, self._chunks = len(items), chunks
            self._loaded = self._load()
        _, nbytes = room(items)
        self._write(as_array(lane.host + at, (nbytes,), "uint8"), items, rescale_grad)
        lane.bring(at, nbytes)
        lane.brought()
        start = lane.device + at
        pointers = {"constants": start, "arrays": start + _CONSTANTS.itemsize}
        lane.launch(self._loaded, {**pointers, "sums": start + nbytes})

    def _load(self) -> Any:
        grid, block = (self._chunks, 1, 1), (_THREADS, 1, 1)
        launches = [Launch("update", grid, block, ("constants", "arrays", "sums"))]
        if self._rule == "lamb":
            arrays = (self._arrays, 1, 1)
            launches.append(Launch("scale", arrays, block, ("constants", "arrays", "sums")))
            launches.append(Launch("apply", grid, block, ("constants", "arrays")))
        plan = Plan(CODE, (("RULE", self._rule.upper()),), tuple(launches))
        return self._machine.load([plan])[0]

    def _write(self, table: np.ndarray, items: Sequence[Item], rescale_grad: float) -> None:
        head, arrays = np.split(table, [_CONSTANTS.itemsize])
        known = {**self._constants, "rescale_grad": rescale_grad}
        floats = (known.get(name, 0) for name in _FLOATS)
        head.view(_CONSTANTS)[0] = (*floats, len(items), (0, 0, 0))
        rows, first = [], 0
        for item in items:
            states = (*item.states, *(0,) * (3 - self.states))
            lr, corrections = self._scalars(item)
            scalars = (lr, item.wd, corrections)
            rows.append((item.weight, item.gradient, states, item.elements, first, *scalars))
            first += divide_up(item.elements, _CHUNK)
        arrays.view(_ARRAY)[:] = rows

    def _scalars(self, item: Item) -> tuple[float, tuple[float, float]]:
        """Return an item's learning rate, and the numbers that its averages are divided by."""
        betas = self._constants.get("beta1", 0), self._constants.get("beta2", 0)
        if self._rule == "adam":
            mean, variance = (1 - beta**item.t for beta in betas)
            return item.lr * math.sqrt(variance) / mean, (1, 1)
        if self._constants.get("bias_correction"):
            # MXNet computes them in float32, far from exact in the first steps.
            one, t = np.float32(1), np.float32(item.t)
            mean, variance = (float(one - np.float32(beta) ** t) for beta in betas)
            return item.lr, (mean, variance)
        return item.lr, (1, 1)


def _variant(rule: str, constants: Constants) -> str:
    if rule in ("sgd", "nag") and not constants["momentum"]:
        return "sgd"
    if rule == "sgd" or (rule == "rmsprop" and constants["centered"]):
        return {"sgd": "sgd_momentum", "rmsprop": "rmsprop_centered"}[rule]
    return rule


def _chunks(items: Sequence[Item]) -> int:
    return sum(divide_up(item.elements, _CHUNK) for item in items)
