"""Run the kernel chosen for each shape once, between marks for a profiler.

    python -m studies.counted_runs GPU SHAPES PRECISIONS

Prints a line of JSON: what ran, in order, how many launches each was, and how many milliseconds
the GPU takes at least to read the layer's inputs and write its outputs once.
"""

from __future__ import annotations

import json
import statistics
import sys

from ece408_op.backends.cuda.kernels import tuned
from ece408_op.backends.cuda.kernels.tuned import Choice
from ece408_op.backends.cuda.runtime import device, launcher
from ece408_op.backends.cuda.runtime.device import BEGIN, COMPUTED
from ece408_op.bench.cuda_timer import bench
from ece408_op.bench.shapes import SHAPES
from ece408_op.problem import ConvProblem

_COPIED_BYTES = 2 << 30


def main() -> None:
    gpu = device.get(int(sys.argv[1]))
    rate = _copy_rate(gpu)
    ran = []
    for shape in sys.argv[2].split(","):
        problem = SHAPES[shape]
        chosen: dict[Choice, str] = {}
        for precision in sys.argv[3].split(","):
            chosen.setdefault(tuned.best(problem, gpu, precision), precision)
        for choice, precision in chosen.items():
            about = {"shape": shape, "precision": precision, "kernel": str(choice)}
            floor = {"floor_ms": 1e3 * problem.bytes / rate}
            ran.append({**about, **floor, "launches": _run(gpu, problem, choice)})
    print(json.dumps(ran))


def _run(gpu: device.Gpu, problem: ConvProblem, choice: Choice) -> int:
    plan = choice.kernel.plan(problem, gpu.capability, False, choice.layout)
    with bench(gpu, problem) as arrays:
        arrays.time(choice.kernel, 1, plan)
        gpu.cuda.start_profiler()
        arrays.launch(launcher.load(gpu, plan))
        gpu.cuda.stop_profiler()
    return len(plan.launches)


def _copy_rate(gpu: device.Gpu) -> float:
    """Bytes a second that a copy within the GPU's memory reads and writes."""
    seconds = []
    with gpu.active(), gpu.lane(2 * _COPIED_BYTES) as lane:
        for _ in range(8):
            lane.mark(BEGIN)
            gpu.cuda.memcpy_dtod_async(
                lane.device + _COPIED_BYTES, lane.device, _COPIED_BYTES, lane.stream
            )
            lane.mark(COMPUTED)
            lane.wait()
            seconds.append(lane.seconds(BEGIN, COMPUTED))
    return 2 * _COPIED_BYTES / statistics.median(seconds)


if __name__ == "__main__":
    main()
