"""A network's weights on one GPU: copies of host arrays, updated when these change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .host_arrays import Array
from .machines.machine import GpuMachine


class WeightsNeeded(Exception):
    """Weights must be copied to the GPU, and their arrays may be moved during the copy."""


@dataclass
class _Weight:
    """A copy of an array; `None` until the copy is complete."""

    address: int
    nbytes: int
    source: Array | None = None


class Weights:
    """Copies of the inputs with these numbers. `stamp` changes whenever any of their contents may
    have."""

    def __init__(self, machine: GpuMachine, numbers: Collection[int]) -> None:
        self._machine = machine
        self._numbers = numbers
        self._held: dict[int, _Weight] = {}
        self._generation = -1
        self.stamp = 0

    def addresses(self) -> dict[int, int]:
        """Return the addresses by number."""
        return {number: weight.address for number, weight in self._held.items()}

    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._held.values())

    def bring(self, inputs: Sequence[Array], generation: int, are_held: bool) -> bool:
        """Copy missing or changed weights to the GPU; calls with the same `generation` have the
        same weights. Returns whether addresses have changed.

        Raises `WeightsNeeded` if a copy is needed and the arrays are not held.
        """
        if generation == self._generation:
            return False
        if not are_held:
            raise WeightsNeeded
        before = self.addresses()
        for number in self._numbers:
            array, weight = inputs[number], self._held.get(number)
            source = weight and weight.source
            if not source or (source.address, source.version) != (array.address, array.version):
                self.stamp += 1
                self._bring(number, array)
        self._generation = generation
        return self.addresses() != before

    def close(self) -> None:
        """Free the copies."""
        self._generation = -1
        for weight in self._held.values():
            self._machine.free(weight.address)
        self._held.clear()

    def _bring(self, number: int, array: Array) -> None:
        weight = self._held.get(number)
        if weight is not None and weight.nbytes != array.nbytes:
            self._machine.free(self._held.pop(number).address)
            weight = None
        if weight is None:
            weight = _Weight(self._machine.allocate(array.nbytes), array.nbytes)
            self._held[number] = weight
        weight.source = None
        self._machine.upload(weight.address, array.address, array.nbytes)
        weight.source = array
