"""`load_network`: a network from MXNet's files on NumPy arrays, without MXNet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union

import numpy as np

from ..errors import InvalidProblem, InvalidSetting
from . import Network, StepTime
from .checkpoint import Checkpoint, read
from .host_arrays import ITEM_BYTES, Array

_MACHINES = ("cpu", "gpu", "emulator")
_MOST_SHAPES = 64
_T = TypeVar("_T")
Result = Union[np.ndarray, "tuple[np.ndarray, ...]"]


def load_network(prefix: str | Path, epoch: int = 0, on: str = "cpu") -> LoadedNetwork:
    """Return the network of PREFIX-symbol.json and PREFIX-EPOCH.params, as `Module.save_checkpoint`
    and Gluon's `export` write them. MXNet is not needed.

    It runs `on` the "cpu", the "gpu" (PyCUDA), or the "emulator". Raises `CheckpointMissing` and
    `CheckpointMismatch` for missing and damaged files, `InvalidSetting` for another machine, and
    `UnsupportedProblem` for operators that are not computed.
    """
    if on not in _MACHINES:
        raise InvalidSetting(f"on={on!r}; choose one of {', '.join(_MACHINES)}")
    return LoadedNetwork(read(prefix, epoch), on)


class LoadedNetwork:
    """A network for inference, from `load_network`. Call it with NumPy arrays for its inputs
    `data`, in order; it returns an array, or a tuple of its outputs. Float16 arrays and bytes are
    taken as they are, others as float32, in which it computes. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, on: str) -> None:
        self.data = checkpoint.data
        self._versions = itertools.count(1)
        # Inference does not read labels.
        labels = dict.fromkeys(checkpoint.labels, np.zeros(1, np.float32))
        found = {n: _prepared(each) for n, each in {**checkpoint.parameters, **labels}.items()}
        self._parameters = {n: (each, self._description(each)) for n, each in found.items()}
        names = [*self.data, *self._parameters]
        self._network = Network(checkpoint.text, names, list(self._parameters), on=on)
        self._shapes: dict[Any, list[tuple[int, ...]]] = {}

    def __call__(self, *arrays: Any) -> Result:
        """Return the outputs, float32. Raises `InvalidProblem` and `UnsupportedProblem` for arrays
        that do not fit, and the errors of computing."""
        outputs, _ = self._run(arrays, self._network.compute)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def steps(self, *arrays: Any) -> list[StepTime]:
        """Return the steps of a call with their kernels and seconds, measured one by one."""
        return self._run(arrays, self._network.measure)[1]

    def set(self, name: str, values: Any) -> None:
        """Replace a parameter by a copy of `values`, of the same shape. Raises `InvalidProblem`."""
        new = _prepared(np.array(values))
        old = self._parameters[name][1].shape if name in self._parameters else None
        if old != new.shape:
            known = f"parameter {name} has shape {old}" if old is not None else "no parameter"
            raise InvalidProblem(f"{known}; {name} cannot become an array of shape {new.shape}")
        self._parameters[name] = new, self._description(new)

    def close(self) -> None:
        """Free its memory; the next call allocates it again."""
        self._network.close()

    def _run(
        self, arrays: Sequence[Any], run: Callable[[list[Array], list[Array]], _T]
    ) -> tuple[list[np.ndarray], _T]:
        """Return the outputs, and the result of `run` on the inputs and these."""
        if len(arrays) != len(self.data):
            raise InvalidProblem(
                f"the network takes {len(self.data)} arrays ({', '.join(self.data)}), and is "
                f"called with {len(arrays)}"
            )
        given = [_prepared(np.asarray(each)) for each in arrays]
        # Held during the call: another thread may replace parameters.
        parameters = list(self._parameters.values())
        inputs = [*map(self._description, given), *(described for _, described in parameters)]
        key = tuple((each.shape, each.dtype.name) for each in given)
        if key not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._network.output_shapes(inputs)
        outputs = [np.empty(shape, np.float32) for shape in self._shapes[key]]
        return outputs, run(inputs, [self._description(each) for each in outputs])

    def _description(self, array: np.ndarray) -> Array:
        return Array(array.ctypes.data, array.shape, array.dtype.name, next(self._versions))


def _prepared(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array of a type that networks take."""
    dtype = array.dtype if array.dtype.name in ITEM_BYTES else np.dtype(np.float32)
    if array.dtype.kind not in "biuf":
        raise InvalidProblem(f"arrays of {array.dtype} are not computed; give numbers")
    return np.require(array, dtype, ["C", "A"])
