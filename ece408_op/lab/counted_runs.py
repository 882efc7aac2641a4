"""Run the kernel chosen for each shape once, between marks for a profiler.

    python -m ece408_op.lab.counted_runs GPU SHAPES PRECISIONS

Prints a line of JSON: what ran, in order, and how many launches each was.
"""

from __future__ import annotations

import json
import sys

from ..backends.cuda import device, launcher, tuned
from ..backends.cuda.tuned import Choice
from ..problem import ConvProblem
from .cuda_bench import bench
from .shapes import SHAPES


def main() -> None:
    gpu = device.get(int(sys.argv[1]))
    ran = []
    for shape in sys.argv[2].split(","):
        chosen: dict[Choice, str] = {}
        for precision in sys.argv[3].split(","):
            chosen.setdefault(tuned.best(SHAPES[shape], gpu, precision), precision)
        for choice, precision in chosen.items():
            launches = _run(gpu, SHAPES[shape], choice)
            about = {"shape": shape, "precision": precision, "kernel": str(choice)}
            ran.append({**about, "launches": launches})
    print(json.dumps(ran))


def _run(gpu: device.Gpu, problem: ConvProblem, choice: Choice) -> int:
    plan = choice.kernel.plan(problem, gpu.capability, False, choice.tunables)
    with bench(gpu, problem) as arrays:
        arrays.time(choice.kernel, 1, plan)
        gpu.cuda.start_profiler()
        arrays.launch(launcher.load(plan, gpu.capability))
        gpu.cuda.stop_profiler()
    return len(plan.launches)


if __name__ == "__main__":
    main()
