"""Settings: from arguments first, then the environment, then defaults.

==================  =========================  =====================================================
setting             environment                meaning
==================  =========================  =====================================================
backend             ECE408_BACKEND             cpu, cuda, reference or emulator;
                                               default: by device
kernel              ECE408_KERNEL              CUDA kernel of the forward pass, or a file with a
                                               kernel for the CPU or the GPU; default: the best one
devices             ECE408_DEVICES             GPUs for arrays on the CPU, such as 0,1; default: 0
precision           ECE408_PRECISION           minimum precision of a float32 forward pass:
                                               strict, float32, tf32, float16; default: float32
gradient_precision  ECE408_GRADIENT_PRECISION  minimum precision of gradients; default: float32, or
                                               strict if the forward pass is
gpu_memory          ECE408_GPU_MEMORY          maximum GPU memory for arrays on the CPU, such as
                                               512M or 2G; default: half of the free memory
emulation           ECE408_EMULATION           fast, or checked, which checks each memory access;
                                               default: fast
isa                 ECE408_ISA                 instruction set of the CPU kernels: avx512, avx2,
                                               baseline
threads             ECE408_THREADS             threads of the CPU kernels; default: the usable cores
data                ECE408_DATA                folder with Fashion-MNIST's idx files
cache               ECE408_CACHE               folder for cached data, resized images and kernels
==================  =========================  =====================================================

Overrides are process-wide, not thread-local, because MXNet runs operators on threads of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .errors import InvalidSetting, InvalidSize
from .host import cores
from .problem import check_precision

_VARIABLES = {
    "backend": "ECE408_BACKEND",
    "kernel": "ECE408_KERNEL",
    "devices": "ECE408_DEVICES",
    "precision": "ECE408_PRECISION",
    "gradient_precision": "ECE408_GRADIENT_PRECISION",
    "gpu_memory": "ECE408_GPU_MEMORY",
    "emulation": "ECE408_EMULATION",
    "isa": "ECE408_ISA",
    "threads": "ECE408_THREADS",
    "data": "ECE408_DATA",
    "cache": "ECE408_CACHE",
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ISAS = ("avx512", "avx2", "baseline")
EMULATIONS = ("fast", "checked")

_overrides: dict[str, str] = {}
_watchers: list[Callable[[], object]] = []


def _lookup(name: str) -> str | None:
    return _overrides.get(name) or os.environ.get(_VARIABLES[name]) or None


def is_set(name: str) -> bool:
    """Return whether the setting has a value, here or in the environment."""
    return _lookup(name) is not None


def configure(**values: str | int | Path | None) -> None:
    """Set settings for the rest of the process; `None` restores the environment's value.

    Raises `InvalidSetting` for an unknown name.
    """
    for name, value in values.items():
        if name not in _VARIABLES:
            raise InvalidSetting(f"unknown setting {name!r}; there are: {', '.join(_VARIABLES)}")
        if value is None:
            _overrides.pop(name, None)
        else:
            _overrides[name] = str(value)
    _tell_watchers()


def watch(on_change: Callable[[], object]) -> None:
    """Call `on_change` after every change of a setting, except in the environment."""
    _watchers.append(on_change)


def _tell_watchers() -> None:
    for on_change in _watchers:
        on_change()


@contextlib.contextmanager
def override(**values: str | int | Path | None) -> Iterator[None]:
    """Apply `configure` for the duration of a `with` block."""
    before = dict(_overrides)
    try:
        configure(**values)
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
        _tell_watchers()


def backend() -> str | None:
    """Name of the requested backend, or `None` for the device's default."""
    return _lookup("backend")


def kernel() -> str | None:
    """Name of the requested CUDA kernel or of a file with a kernel; `None` for the best."""
    return _lookup("kernel")


def precision() -> str:
    """Minimum precision of the forward pass. Raises `InvalidSetting`."""
    return check_precision(_lookup("precision") or "float32")


def gradient_precision() -> str | None:
    """Minimum precision of gradients, or `None` for the default. Raises `InvalidSetting`."""
    name = _lookup("gradient_precision")
    return None if name is None else check_precision(name, "gradient precision")


def devices() -> tuple[int, ...]:
    """Numbers of the GPUs that compute for arrays on the CPU. Raises `InvalidSetting`."""
    text = _lookup("devices") or "0"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise InvalidSetting(
            f"{text!r} is not a list of GPUs (--gpu, ECE408_DEVICES); give numbers such as 0,1, "
            "each once"
        )
    return tuple(map(int, parts))


def gpu_memory() -> int | None:
    """Maximum bytes of a GPU's memory, or `None`. Raises `InvalidSetting`."""
    text = _lookup("gpu_memory")
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)([KMG]?)(?:i?B)?", text.strip(), re.I)
    if match is None:
        raise InvalidSetting(
            f"{text!r} is not an amount of memory (ECE408_GPU_MEMORY); give a number of bytes, or "
            "one with K, M or G, such as 512M"
        )
    return int(match[1]) * _UNITS[match[2].upper()]


def emulation() -> str:
    """Mode of the emulator, of `EMULATIONS`. Raises `InvalidSetting`."""
    return _one_of("emulation", EMULATIONS, "emulation") or EMULATIONS[0]


def isa() -> str | None:
    """Requested instruction set, or `None` for the best of this CPU. Raises `InvalidSetting`."""
    return _one_of("isa", ISAS, "instruction set")


def _one_of(setting: str, names: Sequence[str], what: str) -> str | None:
    name = _lookup(setting)
    if name is not None and name not in names:
        raise InvalidSetting(
            f"unknown {what} {name!r} ({_VARIABLES[setting]}); choose one of {', '.join(names)}"
        )
    return name


def parse_threads(text: str) -> int:
    """Parse a number of threads, at least 1. Raises `InvalidSize`."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise InvalidSize(f"{text!r} is not a number of threads; give a whole number from 1 up")
    return count


def threads() -> int:
    """Number of threads of the CPU kernels: the setting, or the usable cores."""
    text = _lookup("threads")
    return cores.usable() if text is None else parse_threads(text)


def data() -> Path | None:
    """Folder that the user named for Fashion-MNIST, or `None` to search."""
    text = _lookup("data")
    return None if text is None else Path(text).expanduser()


def cache() -> Path:
    """Cache folder, which may not exist yet."""
    text = _lookup("cache")
    if text is not None:
        return Path(text).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ece408_op"
