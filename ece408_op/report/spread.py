"""The spread of repeated measurements: their median and their middle half."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of some runs, and the quartiles; all are equal for a single run."""

    median: float
    low: float
    high: float
    runs: int

    @staticmethod
    def of(samples: Sequence[float]) -> Spread | None:
        """Compute the spread; `None` without samples."""
        if not samples:
            return None
        if len(samples) == 1:
            return Spread(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median, low, high, len(samples))

    def scaled(self, factor: float) -> Spread:
        """Return the same spread in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.runs)
