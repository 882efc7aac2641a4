"""Run the kernel chosen for each shape once, between marks for a profiler.

    python counted_runs.py GPU SHAPES PRECISIONS DIRECTIONS

Shapes, or problems, are separated by spaces, the others by commas.

Prints a line of JSON: what ran, in order, how many launches each was, and how many milliseconds
the GPU takes at least to read the layer's inputs and write its outputs once.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys

from ece408_op.backends.cuda.kernels import tuned
from ece408_op.backends.cuda.kernels.tuned import Choice
from ece408_op.backends.cuda.runtime import device, launcher
from ece408_op.backends.cuda.runtime.device import BEGIN, COMPUTED
from ece408_op.bench import shapes
from ece408_op.bench.cuda_timer import bench
from ece408_op.problem import ConvProblem

_COPIED_BYTES = 2 << 30


def main() -> None:
    gpu = device.get(int(sys.argv[1]))
    rate = _copy_rate(gpu)
    ran = []
    names, precisions, directions = sys.argv[2].split(" "), *(a.split(",") for a in sys.argv[3:])
    for shape, direction in itertools.product(names, directions):
        problem = shapes.find(shape)
        chosen: dict[Choice, str] = {}
        for precision in precisions:
            chosen.setdefault(tuned.best(problem, gpu, precision, direction), precision)
        for choice, precision in chosen.items():
            about = {"shape": shape, "precision": precision, "kernel": str(choice)}
            floor = {"floor_ms": 1e3 * problem.bytes / rate}
            launches = _run(gpu, problem, choice, direction)
            ran.append({**about, **floor, "launches": launches})
    print(json.dumps(ran))


def _run(gpu: device.Gpu, problem: ConvProblem, choice: Choice, direction: str) -> int:
    plan = choice.kernel.plan(problem, gpu.capability, False, choice.layout)
    with bench(gpu, problem, direction) as arrays:
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
