"""Layers of networks on a GPU: each direction by the chosen kernel, and by cuDNN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernel_plan import Plan
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import device
from ece408_op.backends.cuda.runtime.device import Gpu
from ece408_op.bench import cuda_timer, results
from ece408_op.bench.compiling import compile_all
from ece408_op.bench.peers import cudnn
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.errors import Ece408Error
from ece408_op.problem import ConvProblem

from . import layers
from .bench_request import Request

ABOUT = "Float32; `kernel` is the chosen one. cuDNN without TF32."
# cuDNN's variants, without TF32.
# Rows of which a table also lists the slowest.
_MANY = 600
_VARIANTS = ("NCHW float32", "NHWC float32")


def rows(request: Request) -> Iterator[Row]:
    """Yield a row for each layer, batch and direction; one that cannot be measured is a failure."""
    gpu = device.get(request.gpu)
    cases = list(itertools.product(layers.problems(request), request.directions))
    plans = [
        plan
        for (*_, problem), direction in cases
        for plan in plans_of(gpu, problem, direction, request.kernels).values()
    ]
    # The kernel that checks gradients for w.
    checked = (problem for (*_, problem), direction in cases if direction == "backward_weight")
    plans += [cuda_timer.strict_plan(gpu, each, "backward_weight") for each in checked]
    compile_all(gpu, plans)
    with request.peer("cudnn", cudnn.Peer) as peer:
        for (text, batch, problem), direction in cases:
            row: Row = {"case": text, "batch": batch, "direction": direction}
            try:
                _measure(row, gpu, problem, request)
                if peer is not None:
                    cudnn.add(row, peer.measure(problem, request.repeat, direction, _VARIANTS))
            except Ece408Error as error:
                row["failure"] = str(error)
            yield row


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown; of many also those that take twice a peer's time, the slowest
    ones first."""
    slow = []
    for row in (each for each in rows if each.get("ms") and len(rows) > _MANY):
        ours, peers = results.median(row, OURS), results.peers(row)
        if ours and peers and 2 * min(peers.values()) < ours:
            where = f"`{row['case']}`, batch {row['batch']}, {row['direction']}, {row['kernel']}"
            slow.append(f"- {min(peers.values()) / ours:.3f}: {where}")
    counted = [f"Below half of a peer's speed: {len(slow)} of {len(rows)}"] if slow else []
    return "\n\n".join([results.table(rows), "\n".join([*counted, *sorted(slow)[:10]])]).strip()


def _measure(row: Row, gpu: Gpu, problem: ConvProblem, request: Request) -> None:
    """Measure the chosen kernel, and the requested ones that can compute the problem."""
    plans = plans_of(gpu, problem, row["direction"], request.kernels)
    chosen = next(iter(plans))
    row.update(kernel=chosen, ms={}, errors={})
    with cuda_timer.bench(gpu, problem, row["direction"]) as bench:
        for name, plan in plans.items():
            timing = bench.time(catalog.get(name), request.repeat, plan)
            who = OURS if name == chosen else name
            row["ms"][who], row["errors"][who] = summary(timing.samples_ms), timing.error
            if timing.failure:
                row.setdefault("failures", {})[who] = timing.failure


def plans_of(
    gpu: Gpu, problem: ConvProblem, direction: str, kernels: Sequence[str]
) -> dict[str, Plan]:
    """Return plans by kernel: first the default one, then the named ones."""
    (chosen,) = work.example(problem, direction).plans(gpu, problem.batch)
    plans = {chosen.kernel.name: chosen}
    for name in kernels:
        kernel = catalog.get(name)
        if kernel.direction == direction and kernel.why_not(problem, gpu.capability) is None:
            plans.setdefault(name, kernel.plan(problem, gpu.capability, False))
    return plans
