"""A single plan, run in the emulator."""

import numpy as np

from ece408_op.network.machines.emulated import emulated
from ece408_op.network.machines.machine import Run


def on_gpu(plan, arrays, offset=0):
    """Run a plan on copies of arrays by name, `offset` bytes after an aligned address; return
    them."""
    machine = emulated()
    with machine.lock, machine.active():
        (loaded,) = machine.load([plan])
        bases = {name: machine.allocate(array.nbytes + offset) for name, array in arrays.items()}
        places = {name: base + offset for name, base in bases.items()}
        if plan.workspace_bytes:
            bases["workspace"] = places["workspace"] = machine.allocate(plan.workspace_bytes)
        for name, array in arrays.items():
            machine.upload(places[name], array.ctypes.data, array.nbytes)
        machine.record(None, [Run(loaded, places)]).launch()
        found = {name: np.empty_like(array) for name, array in arrays.items()}
        for name, array in found.items():
            machine.download(array.ctypes.data, places[name], array.nbytes)
        for base in bases.values():
            machine.free(base)
    return found
