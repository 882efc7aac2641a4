"""Client of a cuDNN process, under a Python that has PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...problem import ConvProblem
from ..results import Row, summary
from . import process


class Peer(process.GpuPeer):
    """cuDNN under a Python with PyTorch."""

    program = "cudnn_peer.py"

    def measure(
        self,
        problem: ConvProblem,
        samples: int,
        direction: str = "forward",
        variants: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Return timings by variant, such as "NHWC float32", of one direction of a float32 problem;
        of all variants unless some are named. Raises `InvalidSetting` if the process died."""
        sizes = ("batch", "channels", "height", "width", "filters", "kernel")
        steps = ("stride", "pad", "dilate", "groups")
        layer = {name: getattr(problem, name) for name in (*sizes, *steps)}
        return self.ask(**layer, samples=samples, direction=direction, variants=variants)


def add(row: Row, measured: Mapping[str, Any]) -> None:
    """Add the result of `Peer.measure` to a row."""
    for variant, found in measured.items():
        who = f"cudnn {variant}"
        if "failure" in found:
            row.setdefault("failures", {})[who] = found["failure"]
            continue
        row["ms"][who] = summary(found["samples_ms"])
        if "error" in found:
            row.setdefault("errors", {})[who] = found["error"]
