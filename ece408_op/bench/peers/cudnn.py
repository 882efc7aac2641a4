"""Asks a Python that has PyTorch for cuDNN's times."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...problem import ConvProblem
from ..results import Row, summary
from . import process


class Peer(process.Peer):
    """`cudnn_peer` under this Python, without this one's packages and libraries on its paths."""

    def __init__(self, python: str) -> None:
        paths = ("PYTHONPATH", "LD_LIBRARY_PATH")
        clean = {name: value for name, value in os.environ.items() if name not in paths}
        remedy = (
            "its messages, if any, are above. Give a Python with PyTorch and CUDA by "
            "--peer-python, or leave cuDNN out with --no-peer"
        )
        super().__init__("cudnn_peer.py", python, clean, remedy)

    def measure(
        self,
        problem: ConvProblem,
        samples: int,
        direction: str = "forward",
        variants: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Timings by variant, such as "NHWC float32", of one direction of a float32 problem; of all
        variants unless some are named. Raises `InvalidSetting` if the process died."""
        sizes = ("batch", "channels", "height", "width", "filters", "kernel")
        steps = ("stride", "pad", "dilate", "groups")
        layer = {name: getattr(problem, name) for name in (*sizes, *steps)}
        return self.ask(**layer, samples=samples, direction=direction, variants=variants)


def add(row: Row, measured: Mapping[str, Any]) -> None:
    """Put what `Peer.measure` gives into a row."""
    for variant, found in measured.items():
        who = f"cudnn {variant}"
        if "failure" in found:
            row.setdefault("failures", {})[who] = found["failure"]
            continue
        row["ms"][who] = summary(found["samples_ms"])
        if "error" in found:
            row.setdefault("errors", {})[who] = found["error"]
