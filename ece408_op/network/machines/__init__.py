"""Machines that compute networks, and the steps that each makes of an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import settings

if TYPE_CHECKING:
    from .machine import Machine


def chosen(on: str) -> list[Machine]:
    """Return the CPU for "cpu", the emulator for "emulator"; for "gpu" the GPUs that the settings
    name, or the emulator. Raises `NoUsableGpu` and `InvalidSetting`."""
    # Imported only if used.
    if on == "cpu":
        from .cpu import Cpu

        return [Cpu()]
    if "emulator" in (on, settings.backend()):
        from .emulated import emulated

        return [emulated()]
    from .real_gpu import real_gpu

    return [real_gpu(index) for index in settings.devices()]


def of_context(on: str, device: int) -> Machine:
    """Return the one of `chosen` for arrays of MXNet's `cpu(device)`: each device has the next, and
    after the last the first again. Raises what `chosen` does."""
    found = chosen(on)
    return found[device % len(found)]
