"""What is kept of a series of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def summary(samples: Sequence[float]) -> dict[str, float]:
    """The median, the smallest, and how many there are. `samples` must not be empty."""
    return {"median": statistics.median(samples), "min": min(samples), "n": len(samples)}
