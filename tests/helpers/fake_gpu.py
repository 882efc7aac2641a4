"""A fake GPU: its memory is the host's, and its kernels are the reference backend's."""

import contextlib
import dataclasses
import os
import threading
import time

import numpy as np

from ece408_op.backends import as_array
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.backends.cuda.kernel_plan import Family, Layout
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime.device import BEGIN, COPIED_IN, COPIED_OUT
from ece408_op.errors import NotEnoughMemory

MARGIN = 4096
POISON = 0xFF  # four of these bytes are a NaN


@dataclasses.dataclass(frozen=True)
class Rows(Layout):
    rows: int


@dataclasses.dataclass(frozen=True)
class Tiled(Family):
    """A family of one layout with three variants of rows: 0, its own choice, 1 and 2."""

    base: Family

    def why_not(self, problem):
        return self.base.why_not(problem)

    def layouts(self, problem, capability):
        return [Rows(0), Rows(1), Rows(2)]

    def plan(self, kernel, problem, layout, accumulate):
        plan = self.base.plan(kernel, problem, Layout(), accumulate)
        return dataclasses.replace(plan, defines=(*plan.defines, *layout.defines))


def tiled(name):
    """A kernel of the catalog, with three variants of its layout."""
    base = catalog.get(name)
    return dataclasses.replace(base, family=Tiled(base.family))


class FakeLane:
    """A lane whose copies and launches happen immediately."""

    def __init__(self, gpu, device_bytes, host_bytes):
        self.gpu = gpu
        self._device = np.full(device_bytes + MARGIN, POISON, np.uint8)
        self._host = np.full(host_bytes + MARGIN, POISON, np.uint8)
        self.device, self.host = self._device.ctypes.data, self._host.ctypes.data
        self._marks = {}
        self._started = 0.0

    def copy_in(self, offset, nbytes, address=None):
        self._device[offset : offset + nbytes] = self._part(offset, nbytes, address)

    def bring(self, offset, nbytes, address=None):
        self.copy_in(offset, nbytes, address)
        self._count(nbytes, address)

    def copy_out(self, offset, nbytes, address=None):
        self._part(offset, nbytes, address)[:] = self._device[offset : offset + nbytes]
        self._count(nbytes, address)

    def _part(self, offset, nbytes, address):
        if address is None:
            return self._host[offset : offset + nbytes]
        return as_array(address, (nbytes,), "uint8")

    def _count(self, nbytes, address):
        if address is not None:
            self.gpu.reached += nbytes

    def launch(self, loaded, pointers):
        self.gpu.spend()
        self.gpu.launches += 1
        loaded.launch(pointers, None)

    def mark(self, event):
        self._marks[event] = time.perf_counter()

    def mark_bringing(self):
        self.mark(BEGIN)

    def brought(self):
        self.mark(COPIED_IN)

    def drain(self):
        self.gpu.waits += 1

    def wait(self):
        self.gpu.waits += 1

    def rest(self):
        pass

    def start_clock(self):
        self._started = time.perf_counter()

    def times(self, clock):
        return tuple(self._marks[e] - clock._started for e in range(BEGIN, COPIED_OUT + 1))

    def intact(self, device_bytes, host_bytes):
        """Tell whether no byte outside the requested memory was written."""
        return (self._device[device_bytes:] == POISON).all() and (
            self._host[host_bytes:] == POISON
        ).all()


class FakeGpu:
    """A GPU of `memory` bytes, of which `lanes` allocates the rest; `requests` records the
    requests. Each of its `launches` calls `spend`. `reached` are bytes of chunks copied outside
    lanes' memory, `waits` counts complete waits for a lane. Lanes of the last request are reused
    for an equal one."""

    name, capability, driver, index, processors = "a fake GPU", (9, 0), 13000, 0, 132

    def __init__(self, memory=1 << 40, spend=lambda: None):
        self.memory, self.spend = memory, spend
        self.launches = self.reached = self.waits = 0
        self.staging = threading.Lock()
        self.cores = frozenset(os.sched_getaffinity(0))
        self.requests = []
        self._idle, self._sizes = [], None

    @property
    def memory_bytes(self):
        return self.memory

    @contextlib.contextmanager
    def active(self):
        yield

    @contextlib.contextmanager
    def ready_lanes(self, count, device_bytes, host_bytes, limit):
        fit = (count, device_bytes, host_bytes) == self._sizes and count * device_bytes <= limit
        if not fit:
            yield []
            return
        self.requests.append((count, device_bytes))
        yield self._idle
        assert all(lane.intact(device_bytes, host_bytes) for lane in self._idle)

    @contextlib.contextmanager
    def lanes(self, count, device_bytes, host_bytes, limit):
        assert count * device_bytes <= limit
        self.requests.append((count, device_bytes))
        if count * device_bytes > self.memory:
            raise NotEnoughMemory("the fake GPU is full")
        self._idle = [FakeLane(self, device_bytes, host_bytes) for _ in range(count)]
        self._sizes = (count, device_bytes, host_bytes)
        yield self._idle
        assert all(lane.intact(device_bytes, host_bytes) for lane in self._idle)


class FakeLoaded:
    """A plan of the catalog's, computed by the reference backend for the given problem."""

    def __init__(self, plan, problem, direction, accumulate):
        self.plan = plan
        self.lock = threading.Lock()
        self._problem, self._direction = problem, direction
        self._accumulate = accumulate

    def launch(self, pointers, stream):
        p, add, reference = self._problem, self._accumulate, ReferenceBackend()
        if self._direction == "forward":
            arrays = (pointers[role] for role in ("x", "w"))
            reference.forward(p, *arrays, pointers.get("bias"), pointers["y"], add)
        elif self._direction == "backward_data":
            reference.backward_data(p, pointers["w"], pointers["dy"], pointers["dx"], add)
        elif self._direction == "backward_weight":
            x, dy, dw = (pointers[role] for role in ("x", "dy", "dw"))
            reference.backward_weight(p, x, dy, dw, None, add, False)
        else:
            dy, dbias = pointers["dy"], pointers["dbias"]
            reference.backward_weight(p, 0, dy, None, dbias, False, add)
