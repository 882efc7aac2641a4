"""The operator on the CPU beside MXNet's Convolution and PyTorch's, and the machine's ceilings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.bench import ceilings, shapes
from ece408_op.bench.cpu_timer import (
    Sample,
    TorchPeer,
    bind,
    check,
    inputs,
    interleaved,
    torch_contenders,
)
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.errors import surfaced
from ece408_op.problem import ConvProblem

from .bench_request import Request

ABOUT = (
    "The operator alone, bound by MXNet. A floor is this machine's time in the same run for "
    "all multiply-adds, or to read and write everything once; `winograd` does fewer. Fresh memory "
    "is untouched."
)
# Batch; a larger one needs too much memory for the arrays of the operator and of each peer.
_MOST_FOR_GRADIENTS = 1000


def rows(request: Request) -> Iterator[Row]:
    """Yield three rows for each case and batch: into touched memory, into fresh memory, both
    gradients."""
    isa, threads = native.isas()[0], settings.threads()
    problems = [
        (case, shapes.find(case if "," not in case else f"b1,{case}", batch))
        for case in request.cases
        for batch in request.batches
    ]
    top = ceilings.measure(isa, threads)
    with request.peer("torch", TorchPeer) as peer:
        for case, problem in problems:
            few = dataclasses.replace(problem, batch=min(problem.batch, _MOST_FOR_GRADIENTS))
            for measured, at in ((_warm, problem), (_fresh, problem), (_gradients, few)):
                yield {"case": case, "batch": at.batch, **measured(at, request, peer, top)}
    top = top.best(ceilings.measure(isa, threads))
    request.versions["ceilings"] = (
        f"{top.gflops:.0f} GFLOP/s, {top.store_gbs:.1f} GB/s stored, {top.read_gbs:.1f} read, "
        f"{top.fresh_gbs:.1f} stored into fresh memory"
    )


def _warm(
    problem: ConvProblem, request: Request, peer: TorchPeer | None, top: ceilings.Ceilings
) -> Row:
    x, w = inputs(problem)
    ours, native_one = (bind(problem, x, w, ours=own) for own in (True, False))
    with surfaced(), torch_contenders(peer, problem, "forward") as others:
        # Each touches its own output first, and thus determines its pages.
        ours.forward()
        ours.executor.outputs[0][:] = float("nan")
        ours.forward()
        error = check(problem, x, w, ours.executor.outputs[0])
        contenders = {OURS: ours.forward, **_mxnet(request, native_one.forward), **others}
        row = _row("forward", contenders, request, top.floor_ms(problem))
    return {**row, "error": error}


def _fresh(
    problem: ConvProblem, request: Request, peer: TorchPeer | None, top: ceilings.Ceilings
) -> Row:
    """Measure in separate turns: the kernel or hypervisor may still be reclaiming one contender's
    pages while the next one runs."""
    x, w = inputs(problem)

    def first(is_ours: bool) -> Sample:
        # A new executor, whose output is untouched.
        return lambda: bind(problem, x, w, ours=is_ours).forward()

    with surfaced():
        contenders = {OURS: first(True), **_mxnet(request, first(False))}
        floor = top.floor_ms(problem, fresh=True)
        return _row("forward, into fresh memory", contenders, request, floor)


def _gradients(
    problem: ConvProblem, request: Request, peer: TorchPeer | None, top: ceilings.Ceilings
) -> Row:
    x, w = inputs(problem)
    ours, native_one = (bind(problem, x, w, ours=own, gradients=True) for own in (True, False))
    with surfaced(), torch_contenders(peer, problem, "backward") as others:
        contenders = {OURS: ours.backward, **_mxnet(request, native_one.backward), **others}
        return _row("both gradients", contenders, request, 2 * top.compute_ms(problem))


def _mxnet(request: Request, sample: Sample) -> dict[str, Sample]:
    return {"mxnet": sample} if "mxnet" in request.against else {}


def _row(direction: str, contenders: dict[str, Sample], request: Request, floor_ms: float) -> Row:
    times = interleaved(contenders, request.repeat)
    ms = {name: summary(each) for name, each in times.items()}
    return {"direction": direction, "floor_ms": floor_ms, "ms": ms}
