"""List of this machine's GPUs from the driver; needs neither PyCUDA nor MXNet."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import NoUsableGpu

# Attributes of cuDeviceGetAttribute.
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
# The oldest architecture of the compiled CUDA kernels.
OLDEST_CAPABILITY = (7, 5)
OLDEST_CUDA = 12
_USUAL_HOME = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Gpu:
    """One GPU: its number, name, compute capability such as (9, 0), and memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """nvcc's name, such as sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: the CUDA version that it supports, such as "13.0", and its GPUs."""

    cuda_version: str
    gpus: tuple[Gpu, ...]


_LIBRARY = "libcuda.so.1"


def start_ahead(devices: Sequence[int] = ()) -> bool:
    """Start the driver on another thread, which takes 1/3 s, and create these GPUs' contexts;
    return whether there is a driver. Errors reappear where the driver is used."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError:
        return False

    def start() -> None:
        # The GIL is free during these calls, unlike during PyCUDA's.
        cuda.cuInit(0)
        for index in devices:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if not cuda.cuDeviceGet(ctypes.byref(device), index):
                cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    # The process waits for it at exit, instead of ending during these calls.
    threading.Thread(target=start, daemon=False).start()
    return True


def find_driver(library: str = _LIBRARY) -> Driver:
    """Return the driver and its GPUs. Raises `NoUsableGpu` when there is no driver or no GPU."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        raise NoUsableGpu(
            f"no NVIDIA driver ({library} is not there); the CPU milestones m1.1 and m2.1 need none"
        ) from None
    status = cuda.cuInit(0)
    if status:
        raise NoUsableGpu(
            f"the NVIDIA driver does not start (cuInit gives {status}); is there a GPU, and does "
            "nvidia-smi list it?"
        )
    version, count = ctypes.c_int(), ctypes.c_int()
    _check(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if not count.value:
        raise NoUsableGpu("the NVIDIA driver has no GPU; does CUDA_VISIBLE_DEVICES hide it?")
    major, minor = divmod(version.value, 1000)
    gpus = tuple(_describe(cuda, index) for index in range(count.value))
    return Driver(f"{major}.{minor // 10}", gpus)


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    memory, capability = ctypes.c_size_t(), [ctypes.c_int(), ctypes.c_int()]
    _check(cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _check(cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device), "cuDeviceTotalMem")
    for value, attribute in zip(capability, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)):
        status = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        _check(status, "cuDeviceGetAttribute")
    pair = (capability[0].value, capability[1].value)
    return Gpu(index, name.value.decode(), pair, memory.value)


def _check(status: int, function: str) -> None:
    if status:
        raise NoUsableGpu(f"{function} gives {status}; does nvidia-smi work?")


def require_gpus(devices: Sequence[int]) -> tuple[Gpu, ...]:
    """Return all GPUs. Raises `NoUsableGpu` unless all of these numbers exist."""
    gpus = find_driver().gpus
    for index in devices:
        if index >= len(gpus):
            raise NoUsableGpu(
                f"there is no GPU {index} (--gpu, ECE408_DEVICES); there are {len(gpus)}, "
                "numbered from 0"
            )
    return gpus


def require_our_kernels(devices: Sequence[int]) -> None:
    """Raise `NoUsableGpu` unless these GPUs, PyCUDA and nvcc can run our CUDA kernels."""
    gpus = require_gpus(devices)
    for index in devices:
        capability = gpus[index].capability
        if capability < OLDEST_CAPABILITY:
            found, oldest = (".".join(map(str, pair)) for pair in (capability, OLDEST_CAPABILITY))
            raise NoUsableGpu(
                f"the GPU has compute capability {found}, the CUDA kernels need {oldest}; m1.1 and "
                "m2.1 run on the CPU"
            )
    if importlib.util.find_spec("pycuda") is None:
        raise NoUsableGpu("PyCUDA is not installed; `ece408 gpu-setup` compiles it")
    if find_nvrtc() is None and find_nvcc() is None:
        raise NoUsableGpu(
            "neither NVRTC nor nvcc is found; `ece408 gpu-setup` installs NVRTC, or set CUDA_HOME "
            "to a CUDA toolkit"
        )


def find_nvcc() -> Path | None:
    """Return CUDA's compiler: from PATH, CUDA_HOME, its usual folder or pip's wheels, of these one
    whose code the driver loads.

    `None` if none is found.
    """
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    paths = (home / "bin" / "nvcc" for home in _homes(_driver_major() or math.inf))
    return next((path for path in paths if os.access(path, os.X_OK)), None)


class Nvrtc(NamedTuple):
    """CUDA's compiler as a library, and the folder of CUDA's headers."""

    library: Path
    headers: Path


def find_nvrtc(newest: int | None = None) -> Nvrtc | None:
    """Return NVRTC, from where `find_nvcc` looks, of a major version that the driver supports, or
    up to `newest`. `None` if none is found."""
    newest = newest or _driver_major()
    for folder, headers in _nvrtc_folders():
        # The shortest name has the major version alone.
        found = sorted(folder.glob("libnvrtc.so.[0-9]*"))
        for library in found if (headers / "cuda_fp16.h").is_file() else ():
            major = int(library.name.split(".")[2])
            if major >= OLDEST_CUDA and (newest is None or major <= newest):
                return Nvrtc(library, headers)
    return None


@functools.cache
def _driver_major() -> int | None:
    """Return the major version of CUDA that the driver supports, or `None` if that is unknown."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(_LIBRARY).cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000 or None


def _nvrtc_folders() -> Iterator[tuple[Path, Path]]:
    """Yield folders that may have NVRTC, each with that of its headers."""
    on_path = shutil.which("nvcc")
    for home in (*([Path(on_path).resolve().parent.parent] if on_path else []), *_homes()):
        for name in ("lib64", "lib"):
            yield home / name, home / "include"
    # Of wheels for CUDA 12.
    for each in _nvidia():
        yield each / "cuda_nvrtc" / "lib", each / "cuda_runtime" / "include"


def _homes(newest: float = math.inf) -> Iterator[Path]:
    """Yield the folders that may have CUDA, the preferred ones first; of wheels those up to a major
    version."""
    named = os.environ.get("CUDA_HOME")
    yield from ([Path(named)] if named else [])
    yield _USUAL_HOME
    wheels = (home for each in _nvidia() for home in each.glob("cu[0-9][0-9]"))
    yield from sorted((home for home in wheels if int(home.name[2:]) <= newest), reverse=True)


def _nvidia() -> list[Path]:
    """Return the folders of pip's CUDA wheels."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
