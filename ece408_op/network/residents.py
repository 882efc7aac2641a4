"""Parameters that stay on a GPU while a network trains. The host's arrays follow when they are
read: whoever lets others read them calls `fetch` first."""

from __future__ import annotations

import numpy as np

from .gpu_memory import Block, GpuMemory
from .host_arrays import Array
from .machines.machine import GpuMachine

# By the addresses of the host's parameter and of its gradient.
_parameters: dict[int, Resident] = {}
_gradients: dict[int, Resident] = {}


def find(array: Array, machine: GpuMachine, is_gradient: bool) -> Resident | None:
    """Return the resident parameter in the place of a host array, or of its gradient, if any."""
    found = (_gradients if is_gradient else _parameters).get(array.address)
    if found is None or found.machine is not machine or found.host.shape != array.shape:
        return None
    return found


class Resident:
    """A parameter and its gradient, on a GPU in the place of two host arrays of float32, and the
    optimizer's `states`, which begin as zeros. `version` is that of the host's parameter when both
    had the same values, or the GPU had newer ones.

    Raises `NotEnoughMemory`. Create it, and call its methods, with the machine's lock held and the
    machine active.
    """

    def __init__(self, memory: GpuMemory, weight: Array, gradient: Array, states: int) -> None:
        self.machine = memory.machine
        self.host, self.host_gradient = weight, gradient
        use = "training: a parameter"
        self.weight, self.gradient = (memory.lend(weight.nbytes, use) for _ in range(2))
        self.states: list[Block] = [memory.lend(weight.nbytes, use) for _ in range(states)]
        self.version = -1
        # Whether the GPU has newer values than the host.
        self.is_ahead = self.is_gradient_ahead = False
        zeros = np.zeros(weight.nbytes, np.uint8)
        for each in self.states:
            self.machine.upload(each.address, zeros.ctypes.data, weight.nbytes)
        _parameters[weight.address] = _gradients[gradient.address] = self

    def bring(self, version: int) -> None:
        """Copy the host's parameter, which has this version, to the GPU, unless that is known."""
        if version != self.version:
            self.machine.upload(self.weight.address, self.host.address, self.host.nbytes)
            self.version, self.is_ahead = version, False

    def bring_gradient(self) -> None:
        """Copy the host's gradient to the GPU, unless the GPU computed a newer one."""
        if not self.is_gradient_ahead:
            of = self.host_gradient
            self.machine.upload(self.gradient.address, of.address, of.nbytes)

    def fetch(self) -> None:
        """Copy the parameter to the host if the GPU has newer values."""
        if self.is_ahead:
            self.machine.download(self.host.address, self.weight.address, self.host.nbytes)
            self.is_ahead = False

    def close(self) -> None:
        """Let the host's arrays be used as others are."""
        for known, array in ((_parameters, self.host), (_gradients, self.host_gradient)):
            if known.get(array.address) is self:
                del known[array.address]

    def fetch_gradient(self) -> None:
        """Copy the gradient to the host if the GPU has newer values."""
        if self.is_gradient_ahead:
            of = self.host_gradient
            self.machine.download(of.address, self.gradient.address, of.nbytes)
            self.is_gradient_ahead = False
