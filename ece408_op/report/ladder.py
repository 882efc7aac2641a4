"""Ladders: kernels of one device from the simplest to the fastest, with times and gains.

`measure_ladder` measures them in a separate process and writes them as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..course.course_terms import Term
from ..errors import InvalidSetting
from ..problem import ConvProblem
from .spread import Spread


@dataclass(frozen=True)
class Step:
    """One kernel: its idea in a few words, and milliseconds of each timed run by layer.

    `why` explains in a paragraph or two what it changes and why; it may be empty. `samples_ms`
    omits layers that it cannot compute. `change` is a diff against the previous step, or empty.
    `accurate`: as accurate as float32; gains of all steps are relative to the last accurate step
    before them. `computed_by` names the kernel that computed a layer, unless it is the step itself.
    """

    name: str
    idea: str
    accurate: bool
    samples_ms: Mapping[str, list[float]]
    why: str = ""
    change: str = ""
    computed_by: Mapping[str, str] = field(default_factory=dict)

    def spread(self, layer: str) -> Spread | None:
        """Return milliseconds; `None` for a layer without runs."""
        return Spread.of(self.samples_ms.get(layer, ()))

    def median_ms(self, layer: str) -> float | None:
        spread = self.spread(layer)
        return spread.median if spread else None


class Gain(NamedTuple):
    """A step's speed-up over another one, and that one's name."""

    factor: float
    over: str


@dataclass(frozen=True)
class Ladder:
    """The steps on one device, and the libraries that computed the same problems on it.

    `layers` are the problems in their one-line form. `gflops` and `gbs` are measured ceilings of
    the device by name. `floors_ms` are lower bounds by layer, from the ceilings in float32. `notes`
    are sentences on the measurement and on missing results.
    """

    device: str
    batch: int
    layers: Mapping[str, str]
    steps: tuple[Step, ...]
    peers: tuple[Step, ...]
    gflops: Mapping[str, float]
    gbs: Mapping[str, float]
    floors_ms: Mapping[str, float]
    notes: tuple[str, ...] = field(default=())

    def effects(self, layer: str) -> dict[str, Gain]:
        """Return by step its gain on a layer over the last accurate step before it."""
        found: dict[str, Gain] = {}
        before: tuple[float, str] | None = None
        for step in self.steps:
            ms = step.median_ms(layer)
            if ms is None:
                continue
            if before is not None:
                found[step.name] = Gain(before[0] / ms, before[1])
            before = (ms, step.name) if step.accurate else before
        return found

    def fastest(self, layer: str) -> Step | None:
        """Return the fastest accurate step on a layer."""
        timed = [(step.median_ms(layer), step) for step in self.steps if step.accurate]
        found = [(ms, step) for ms, step in timed if ms is not None]
        return min(found, key=lambda pair: pair[0])[1] if found else None


def to_json(ladder: Ladder) -> str:
    """Return one line for `from_json`."""
    return json.dumps(dataclasses.asdict(ladder))


def from_json(text: str) -> Ladder:
    """Return the ladder in a text of `to_json`. Raises `InvalidSetting` for any other text."""
    try:
        document: dict[str, Any] = json.loads(text)
        for name in ("steps", "peers"):
            document[name] = tuple(Step(**step) for step in document[name])
        return Ladder(**{**document, "notes": tuple(document["notes"])})
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSetting(f"these are no times of kernels ({error!r}); measure again") from error


def problems(term: Term, batch: int) -> dict[str, ConvProblem]:
    """Return the convolutions of a term's network, by layer."""
    found: dict[str, ConvProblem] = {}
    channels, side = 1, term.image_size
    for index, filters in enumerate(term.filters, start=1):
        found[f"conv{index}"] = ConvProblem(batch, channels, side, side, filters, (5, 5))
        # Without padding a side shrinks by four pixels; a pooling layer then halves it.
        channels, side = filters, (side - 4) // 2
    return found
