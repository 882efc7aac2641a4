"""Runs of a kernel file under one of NVIDIA's tools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.kernel_file import KernelFile
from ..errors import Ece408Error, UnsupportedProblem
from ..problem import ConvProblem
from .session import Ended, Session

# Under a tool a kernel takes 10 to 1000 times as long.
_CALL_SECONDS, _END_SECONDS = 120.0, 60.0


def compute(kernel: KernelFile | str, tool: Sequence[str], problems: Sequence[ConvProblem]) -> str:
    """Run a file, or one of our CUDA kernels, under a tool's command on each problem, in a process
    isolated as for checking; return why it failed, if it did.

    The tool gets time to write its results.
    """
    rng = np.random.default_rng(408)
    refused = []
    try:
        with Session(kernel, _CALL_SECONDS, tool=tool) as session:
            try:
                for problem in problems:
                    x, w = (
                        rng.standard_normal(shape, np.float32)
                        for shape in (problem.x_shape, problem.w_shape)
                    )
                    try:
                        session.forward(problem, x, w)
                    except UnsupportedProblem as error:
                        refused.append(str(error))
            finally:
                session.wait_for_tool(_END_SECONDS)
    except (Ended, Ece408Error) as error:
        return str(error)
    return refused[0] if len(refused) == len(problems) else ""
