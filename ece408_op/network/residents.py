"""Parameters that stay on a GPU while a network trains. The host's arrays follow when they are
read: whoever lets others read them calls `fetch` first."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np

from ..errors import InvalidSetting
from .gpu_memory import Block, GpuMemory
from .host_arrays import Array
from .machines.machine import GpuMachine

# By the addresses of the host's parameter and of its gradient.
_parameters: WeakValueDictionary[int, Resident] = WeakValueDictionary()
_gradients: WeakValueDictionary[int, Resident] = WeakValueDictionary()
# Addresses of moving averages that passes on a GPU copy to the host: they could be resident.
averages: set[int] = set()
# Changes whenever `find` may find something else.
generation = 0


def find(
    address: int, shape: tuple[int, ...], machine: GpuMachine, is_gradient: bool
) -> Resident | None:
    """Return the resident parameter in the place of a host array, or of its gradient, if any."""
    found = (_gradients if is_gradient else _parameters).get(address)
    if found is None or found.machine is not machine or found.host.shape != shape:
        return None
    return found


def count_write(address: int, version: int) -> None:
    """Note that the host counts a write to the array at an address, which then has this version,
    for a pass that does not change it there."""
    found = _parameters.get(address)
    if found is not None and found.version == version - 1:
        found.version = version


def _changed() -> None:
    global generation
    generation += 1


class Resident:
    """A parameter and its gradient, if any, on a GPU in the place of two host arrays of float32,
    and the optimizer's `states`, which begin as zeros. Counts of writes to the host's arrays tell
    who has newer values: `version` was that of the parameter when both had the same values, or the
    GPU newer ones (`is_ahead`).

    Raises `NotEnoughMemory`. Create it, and call its methods, with the machine's lock held and the
    machine active.
    """

    def __init__(
        self, memory: GpuMemory, name: str, weight: Array, gradient: Array | None, states: int
    ) -> None:
        self.machine, self._name = memory.machine, name
        self.host, self.host_gradient = weight, gradient
        use = "training: a parameter"
        count = 1 + (gradient is not None) + states
        blocks = [memory.lend(weight.nbytes, use) for _ in range(count)]
        self.weight, self.gradient = blocks[0], blocks[-1 - states]
        self.states: list[Block] = blocks[count - states :]
        self.version, self.is_ahead = -1, False
        # The version of the host's gradient when the GPU computed one; -1 if the GPU has none.
        self.gradient_version = -1
        zeros = np.zeros(weight.nbytes, np.uint8)
        for each in self.states:
            self.machine.upload(each.address, zeros.ctypes.data, weight.nbytes)
        _changed()
        _parameters[weight.address] = self
        if gradient is not None:
            _gradients[gradient.address] = self

    def bring(self, version: int) -> None:
        """Copy the host's parameter, which has this version, to the GPU, unless that is known.
        Raises `InvalidSetting` if both have newer values."""
        if version != self.version:
            self.check(version)
            self.machine.upload(self.weight.address, self.host.address, self.host.nbytes)
            self.version, self.is_ahead = version, False

    def check(self, version: int | None) -> None:
        """Raise `InvalidSetting` if the GPU has newer values than the host, which has changed, too:
        its array has this version, or is another one (`None`)."""
        if self.is_ahead and version != self.version:
            raise InvalidSetting(
                f"parameter {self._name} was used through an array that was read before its "
                "trainer's last step; read it again by data()"
            )

    def has_gradient(self, version: int) -> bool:
        """Return whether the GPU has a newer gradient than the host's, which has this version. The
        pass that computed it counts as a write."""
        return self.gradient_version >= 0 and version == self.gradient_version + 1

    def bring_gradient(self, version: int) -> None:
        """Copy the host's gradient, which has this version, to the GPU, unless the GPU computed a
        newer one."""
        of = self.host_gradient
        if of is not None and not self.has_gradient(version):
            self.machine.upload(self.gradient.address, of.address, of.nbytes)

    def fetch(self) -> None:
        """Copy the parameter to the host if the GPU has newer values."""
        if self.is_ahead:
            self.machine.download(self.host.address, self.weight.address, self.host.nbytes)
            self.is_ahead = False

    def fetch_gradient(self) -> None:
        """Copy the gradient to the host."""
        assert self.host_gradient is not None
        to, nbytes = self.host_gradient.address, self.host_gradient.nbytes
        self.machine.download(to, self.gradient.address, nbytes)
        self.gradient_version = -1

    def close(self) -> None:
        """Let the host's arrays be used as others are: what the GPU has newer is lost."""
        self.is_ahead = False
        for known, array in ((_parameters, self.host), (_gradients, self.host_gradient)):
            if array is not None and known.get(array.address) is self:
                del known[array.address]
        _changed()
