"""Memory footprint of a forward pass, and available memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..errors import NotEnoughMemory

_FLOAT_BYTES = 4
# Python with MXNet loaded and its threads active, measured 243 MiB.
_PROCESS_BYTES = 320 << 20
# oneDNN's blocked layouts round channels up.
_BLOCKED_CHANNELS = 8
_IN_PLACE = ("Activation", "Flatten", "Reshape")
_CGROUPS = (
    # version 2, version 1: limit, usage, statistics, and the name there of reclaimable cache
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def required_bytes(symbol: Any, images: int, batch_size: int, image_size: int) -> int:
    """Return an upper estimate of the memory for scoring `images` images in batches.

    MXNet computes in order and reuses memory, so the peak is the layer with the largest sum of
    inputs and outputs, plus the images: as uint8, and three times as float32 (the batch, its
    NDArray, and the network's input).
    """
    batch_size = min(batch_size, images)
    image_bytes = image_size * image_size
    _, shapes, _ = symbol.get_internals().infer_shape(data=(batch_size, 1, image_size, image_size))
    nodes = json.loads(symbol.tojson())["nodes"]
    activations = [
        _array_bytes(shape)
        for node, shape in zip(nodes, shapes)
        if node["op"] not in ("null", *_IN_PLACE)
    ]
    peak = max(a + b for a, b in zip(activations, [*activations[1:], 0]))
    batch = 3 * _FLOAT_BYTES * batch_size * image_bytes
    return _PROCESS_BYTES + images * image_bytes + batch + peak


def _array_bytes(shape: tuple[int, ...]) -> int:
    if len(shape) == 4:
        channels = -(-shape[1] // _BLOCKED_CHANNELS) * _BLOCKED_CHANNELS
        shape = (shape[0], channels, *shape[2:])
    return _FLOAT_BYTES * math.prod(shape)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can still get: the machine's, or the container's if
    less."""
    limits = [_meminfo_available(root / "proc/meminfo")]
    cgroup = root / "sys/fs/cgroup"
    for limit_file, usage_file, statistics_file, reclaimable in _CGROUPS:
        limit, usage = _read_int(cgroup / limit_file), _read_int(cgroup / usage_file)
        if limit is not None and usage is not None:
            limits.append(limit - usage + _statistic(cgroup / statistics_file, reclaimable))
    return min(limits)


def _meminfo_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise NotEnoughMemory(f"{path} does not say how much memory is available")


def _statistic(path: Path, name: str) -> int:
    if path.is_file():
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _read_int(path: Path) -> int | None:
    """Return the number in a cgroup file; `None` for a missing file or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def check_memory(symbol: Any, images: int, batch_size: int, image_size: int) -> None:
    """Raise `NotEnoughMemory`, naming a batch size that fits, if the forward pass would not."""
    free = available_bytes()
    needed = required_bytes(symbol, images, batch_size, image_size)
    if needed <= free:
        return
    advice = "no batch size fits: close other programs or score fewer images"
    fitting = _largest_fitting(symbol, images, batch_size, image_size, free)
    if fitting:
        advice = f"use --batch-size {fitting} or less"
    raise NotEnoughMemory(
        f"{batch_size} images in one batch need about {_gib(needed)} of memory and {_gib(free)} "
        f"are free; {advice}"
    )


def _largest_fitting(symbol: Any, images: int, batch_size: int, image_size: int, free: int) -> int:
    """Return the largest batch size of the form 1, 2 or 5 times a power of ten that fits, or 0."""
    candidates = [d * 10**e for e in range(5) for d in (1, 2, 5) if d * 10**e < batch_size]
    for candidate in reversed(candidates):
        if required_bytes(symbol, images, candidate, image_size) <= free:
            return candidate
    return 0


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
