"""A GPU's context, streams, events and memory, all kept for reuse.

PyCUDA frees objects only on the thread that created the context; elsewhere it warns on stderr
("could not be cleaned up"). MXNet runs operators on threads that come and go. So Python never
destroys objects created here: memory is freed explicitly, with the context current, and the rest
lives as long as the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ....errors import GpuFailed, NotEnoughMemory, NoUsableGpu
from ....host import cores
from ....host.gpu import OLDEST_CAPABILITY, find_driver

# Events of a lane: before and after the copies in, after the kernels, after the copies out.
BEGIN, COPIED_IN, COMPUTED, COPIED_OUT, _CLOCK = range(5)
# After some errors CUDA refuses all further work.
RESTART = "; after a failed kernel restart the process"


@dataclass
class Lane:
    """Two streams with their own events and memory, for one thread at a time. Copies by `bring` use
    the second stream, everything else the first.

    On a single stream, copies to the GPU would wait for other lanes' copies from it: CUDA queues an
    event recorded after a copy in that direction's queue, behind copies of other streams.

    `device` and `host` are the addresses of `device_bytes` on the GPU and `host_bytes` of
    page-locked memory, 0 until they are allocated.
    """

    gpu: Gpu
    stream: Any
    second: Any
    events: tuple[Any, ...]
    device: int = 0
    host: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    _blocks: dict[str, Any] = field(default_factory=dict, repr=False)

    def copy_in(self, offset: int, nbytes: int, address: int | None = None) -> None:
        """Enqueue the copy of `nbytes` to `offset` on the GPU: from the same offset in the lane's
        page-locked memory, or from other page-locked memory at `address`."""
        part = self._host_part(offset, nbytes, address)
        with reported("a copy to the GPU"):
            self.gpu.cuda.memcpy_htod_async(self.device + offset, part, self.stream)

    def bring(self, offset: int, nbytes: int, address: int | None = None) -> None:
        """Enqueue a copy as `copy_in` does, but on the second stream, concurrent with the first."""
        part = self._host_part(offset, nbytes, address)
        with reported("a copy to the GPU"):
            self.gpu.cuda.memcpy_htod_async(self.device + offset, part, self.second)

    def brought(self) -> None:
        """Make later work on the first stream wait for all copies by `bring`; record COPIED_IN."""
        self.events[COPIED_IN].record(self.second)
        self.stream.wait_for_event(self.events[COPIED_IN])

    def after(self, other: Lane) -> None:
        """Make later work wait for the kernels of another lane, up to its COMPUTED event."""
        self.stream.wait_for_event(other.events[COMPUTED])

    def copy_out(self, offset: int, nbytes: int, address: int | None = None) -> None:
        """Enqueue the copy of `nbytes` from `offset` on the GPU, to where `copy_in` copies from."""
        part = self._host_part(offset, nbytes, address)
        with reported("a copy from the GPU"):
            self.gpu.cuda.memcpy_dtoh_async(part, self.device + offset, self.stream)

    def move(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy between addresses on the GPU, or on two GPUs."""
        with reported("a copy on the GPU"):
            self.gpu.cuda.memcpy_dtod_async(to, source, nbytes, self.stream)

    def launch(self, loaded: Any, pointers: dict[str, int]) -> None:
        """Enqueue the launches of a loaded plan on these addresses."""
        with reported(f"kernel {loaded.plan.kernel.name}"):
            loaded.launch(pointers, self.stream)

    def mark(self, event: int) -> None:
        """Record an event, such as BEGIN, on the first stream."""
        self.events[event].record(self.stream)

    def mark_bringing(self) -> None:
        """Record BEGIN on the second stream."""
        self.events[BEGIN].record(self.second)

    def wait_for_copies(self) -> None:
        """Wait for all copies by `bring` up to the last `brought`."""
        with reported("a copy to the GPU"):
            self.events[COPIED_IN].synchronize()

    def wait(self) -> None:
        """Wait for the first stream. Raises `GpuFailed` if any of its work failed."""
        with reported("a kernel"):
            self.stream.synchronize()

    def drain(self) -> None:
        """Wait for both streams. Raises `GpuFailed` as `wait` does."""
        with reported("a copy to the GPU"):
            self.second.synchronize()
        self.wait()

    def rest(self) -> None:
        """Wait until COPIED_OUT without busy-waiting; returns a little later than `wait` would."""
        with reported("a kernel"):
            self.events[COPIED_OUT].synchronize()

    def start_clock(self) -> None:
        """Start the clock that `times` of this and other lanes refer to."""
        self.mark(_CLOCK)
        self.wait()

    def times(self, clock: Lane) -> tuple[float, ...]:
        """Return the seconds from the start of another lane's clock to each event of this lane, in
        order."""
        start = clock.events[_CLOCK]
        return tuple(event.time_since(start) / 1e3 for event in self.events[:_CLOCK])

    def seconds(self, begin: int, end: int) -> float:
        """Return the seconds between two events, which must have completed."""
        return self.events[end].time_since(self.events[begin]) / 1e3

    def reserve(self, device_bytes: int, host_bytes: int) -> None:
        """Allocate at least this much memory; earlier contents are lost.

        Raises `NotEnoughMemory`; the lane then has less.
        """
        if self.device_bytes < device_bytes:
            self._free("device")
            block = self._allocate("device", device_bytes)
            self.device, self.device_bytes = int(block), device_bytes
        if self.host_bytes < host_bytes:
            self._free("host")
            block = self._allocate("host", host_bytes)
            self.host, self.host_bytes = block.ctypes.data, host_bytes

    def release(self) -> None:
        """Free the lane's memory; keep its streams and events."""
        self._free("device")
        self._free("host")

    def _host_part(self, offset: int, nbytes: int, address: int | None) -> Any:
        if address is None:
            return self._blocks["host"][offset : offset + nbytes]
        return (ctypes.c_ubyte * nbytes).from_address(address)

    def _allocate(self, kind: str, nbytes: int) -> Any:
        with reported(f"allocating {_mib(nbytes)} on {self.gpu}"):
            if kind == "device":
                self._blocks[kind] = self.gpu.cuda.mem_alloc(nbytes)
            else:
                self._blocks[kind] = self.gpu.cuda.pagelocked_empty(nbytes, "uint8")
        return self._blocks[kind]

    def _free(self, kind: str) -> None:
        block = self._blocks.pop(kind, None)
        if block is None:
            return
        if kind == "device":
            self.device = self.device_bytes = 0
            block.free()
        else:
            self.host = self.host_bytes = 0
            block.base.free()


class Gpu:
    """One GPU: number, name, compute capability such as (9, 0), memory in bytes, number of
    multiprocessors, newest CUDA version that its driver supports, such as 13000, and the cores
    nearest to it.

    Create it with `get`. Everything but the plain attributes requires `with gpu.active()`.
    """

    def __init__(self, cuda: Any, index: int) -> None:
        device = cuda.Device(index)
        self.cuda = cuda
        self.index = index
        self.name: str = device.name()
        self.capability: tuple[int, int] = tuple(device.compute_capability())  # type: ignore[assignment]
        self.driver: int = cuda.get_driver_version()
        self.memory_bytes: int = device.total_memory()
        self.cores = cores.beside(device.pci_bus_id())
        self.processors: int = device.get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT)
        # Held during a staged call; one call at a time makes the best use of the bus.
        self.staging = threading.Lock()
        self._context = device.retain_primary_context()
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._idle: list[Lane] = []
        # Other GPUs by number, and whether kernels here can read their memory.
        self._reached: dict[int, bool] = {}

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this GPU's primary context, which MXNet uses too, current on this thread."""
        self._context.push()
        try:
            yield
        finally:
            # A thread that ends with a context still pushed aborts the process.
            self.cuda.Context.pop()

    def reaches(self, other: Gpu) -> bool:
        """Return whether kernels on this GPU can read the other one's memory; let them."""
        if other.index not in self._reached:
            is_reached = True
            try:
                self.cuda.Context.enable_peer_access(other._context)
            except self.cuda.Error as error:
                # Another library may have done it.
                is_reached = "already enabled" in str(error)
            self._reached[other.index] = is_reached
        return self._reached[other.index]

    def free_bytes(self) -> int:
        """Return the bytes that no process has allocated."""
        with reported(f"asking {self} for its memory"):
            return self.cuda.mem_get_info()[0]

    @contextlib.contextmanager
    def lane(self, device_bytes: int = 0) -> Iterator[Lane]:
        """Provide one lane with at least this much memory. Raises `NotEnoughMemory`."""
        (lane,) = self._take(1)
        try:
            try:
                lane.reserve(device_bytes, 0)
            except NotEnoughMemory:
                self._release_idle()
                lane.reserve(device_bytes, 0)
            yield lane
        finally:
            self._give([lane])

    @contextlib.contextmanager
    def lanes(
        self, count: int, device_bytes: int, host_bytes: int, limit: int
    ) -> Iterator[list[Lane]]:
        """Provide `count` lanes of the given sizes; all lanes together stay within `limit` bytes on
        the GPU.

        Raises `NotEnoughMemory` if the GPU or the host has no more memory, or if lanes of other
        calls leave too little of `limit`.
        """
        lanes = self._take(count)
        try:
            self._make_room(lanes, device_bytes, limit)
            for lane in lanes:
                lane.reserve(device_bytes, host_bytes)
            yield lanes
        except NotEnoughMemory:
            for lane in lanes:
                lane.release()
            self._release_idle()
            raise
        finally:
            self._give(lanes)

    @contextlib.contextmanager
    def ready_lanes(
        self, count: int, device_bytes: int, host_bytes: int, limit: int
    ) -> Iterator[list[Lane]]:
        """Provide lanes as `lanes` does, but only lanes that already have this much memory; an
        empty list if they are too few or exceed `limit`."""
        within = self.reserved_bytes() <= limit
        lanes = self._take_ready(count, device_bytes, host_bytes) if within else []
        try:
            yield lanes
        finally:
            self._give(lanes)

    def reserved_bytes(self) -> int:
        """Return the bytes on the GPU that all lanes have together."""
        with self._lock:
            return sum(lane.device_bytes for lane in self._lanes)

    def _make_room(self, lanes: list[Lane], device_bytes: int, limit: int) -> None:
        growth = sum(max(0, device_bytes - lane.device_bytes) for lane in lanes)
        if self.reserved_bytes() + growth <= limit:
            return
        self._release_idle()
        for lane in lanes:
            lane.release()
        taken = self.reserved_bytes()
        if taken + len(lanes) * device_bytes > limit:
            raise NotEnoughMemory(
                f"{_mib(len(lanes) * device_bytes)} are needed on {self}, and other calls have "
                f"{_mib(taken)} of the {_mib(limit)} allowed (ECE408_GPU_MEMORY)"
            )

    def _release_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.release()
        self._give(idle)

    def _take(self, count: int) -> list[Lane]:
        with self._lock:
            taken = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
        missing = count - len(taken)
        if missing:
            new = [self._new_lane() for _ in range(missing)]
            with self._lock:
                self._lanes += new
            taken += new
        return taken

    def _take_ready(self, count: int, device_bytes: int, host_bytes: int) -> list[Lane]:
        with self._lock:
            ready = [
                number
                for number, lane in enumerate(self._idle)
                if lane.device_bytes >= device_bytes and lane.host_bytes >= host_bytes
            ][:count]
            # From the end, so that the other indices stay valid.
            return [self._idle.pop(number) for number in ready[::-1]] if len(ready) == count else []

    def _give(self, lanes: list[Lane]) -> None:
        with self._lock:
            self._idle += lanes

    def _new_lane(self) -> Lane:
        flags = self.cuda.event_flags
        with reported(f"making a stream on {self}"):
            events = tuple(
                self.cuda.Event(flags.BLOCKING_SYNC if mark == COPIED_OUT else flags.DEFAULT)
                for mark in range(_CLOCK + 1)
            )
            return Lane(self, self.cuda.Stream(), self.cuda.Stream(), events)


_gpus: dict[int, Gpu] = {}
_gpus_lock = threading.Lock()
_process = 0


def get(index: int) -> Gpu:
    """Return GPU number `index`; the first call starts the driver and creates the context.

    Raises `NoUsableGpu` when PyCUDA, the driver or the GPU is missing or too old, or in a child of
    a process that used its GPUs before it forked.
    """
    global _process
    with _gpus_lock:
        if _gpus and os.getpid() != _process:
            raise NoUsableGpu(
                "CUDA does not survive a fork, and this process was forked from one that had used "
                "the GPU; start it with multiprocessing's 'spawn', or compute on the CPU"
            )
        if index not in _gpus:
            _gpus[index] = immortal(_open(index))
            _process = os.getpid()
        return _gpus[index]


def immortal(made: Any) -> Any:
    """Prevent Python from ever destroying an object, even at exit; return the object."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


class reported:
    """Context that turns PyCUDA's errors into `NotEnoughMemory` and `GpuFailed`, naming `what`.

    A class because a staged call enters several per chunk, and a generator takes 3 us more.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        cuda: Any = importlib.import_module("pycuda.driver")
        if isinstance(error, cuda.MemoryError):
            raise NotEnoughMemory(
                f"{self._what} failed for want of memory; close other programs, use a smaller "
                "batch, or for arrays on the CPU set ECE408_GPU_MEMORY to less"
            ) from error
        if isinstance(error, cuda.Error):
            reason = str(error).splitlines()[0]
            raise GpuFailed(f"{self._what} failed: {reason}{RESTART}") from error


def _open(index: int) -> Gpu:
    cuda = _driver()
    count = cuda.Device.count()
    if index >= count:
        raise NoUsableGpu(f"there is no GPU {index}; there are {count}, numbered from 0")
    try:
        gpu = Gpu(cuda, index)
    except cuda.Error as error:
        raise NoUsableGpu(
            f"GPU {index} cannot be used: {error}; does nvidia-smi show it, and is it free?"
        ) from error
    if gpu.capability < OLDEST_CAPABILITY:
        found, oldest = (".".join(map(str, pair)) for pair in (gpu.capability, OLDEST_CAPABILITY))
        raise NoUsableGpu(
            f"{gpu} has compute capability {found}, the CUDA kernels need {oldest}; the backends "
            "cpu and reference need no GPU"
        )
    return gpu


def _driver() -> Any:
    """Return PyCUDA's initialised driver module."""
    # Without a driver PyCUDA warns before it fails, and does not name what is missing.
    find_driver()
    try:
        cuda: Any = importlib.import_module("pycuda.driver")
        cuda.init()
    except ModuleNotFoundError:
        raise NoUsableGpu("PyCUDA is not installed; `ece408 gpu-setup` compiles it") from None
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise NoUsableGpu(
            f"PyCUDA does not import ({reason}); `ece408 gpu-setup` compiles it for this machine"
        ) from error
    except Exception as error:
        raise NoUsableGpu(
            f"the NVIDIA driver does not start ({error}); is there a GPU, and does nvidia-smi "
            "list it?"
        ) from error
    return cuda


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
