"""Ladders of kernels: instruction sets on the CPU, every kernel beside cuDNN on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from ece408_op.backends.cpu import native
from ece408_op.backends.cuda.kernel_plan import Kernel
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import cpu_timer, cuda_timer, shapes
from ece408_op.bench.peers import cudnn
from ece408_op.bench.results import Row, summary
from ece408_op.errors import Ece408Error
from ece408_op.problem import ConvProblem

from .bench_request import Request

ABOUT_CPU = "Into touched memory; one run of the textbook loops (reference)."
ABOUT_GPU = "Each kernel by itself, by events; cuDNN through PyTorch."


def rows_on_cpu(request: Request) -> Iterator[Row]:
    """Yield a row for each case and batch."""
    isas = tuple(reversed(native.isas()))
    with request.peer("torch", cpu_timer.TorchPeer) as peer:
        for case in request.cases:
            for batch in request.batches:
                problem = shapes.find(case, batch)
                times, _ = cpu_timer.by_isa(problem, isas, peer, request.repeat)
                ms = {who: summary(samples) for who, samples in times.items()}
                yield {"case": case, "batch": batch, "ms": ms}


def rows_on_gpu(request: Request) -> Iterator[Row]:
    """Yield a row for each case and batch, checked; results of an earlier run are not measured
    again."""
    gpu = device.get(request.gpu)
    forward = [kernel for kernel in catalog.KERNELS if kernel.direction == "forward"]
    kernels = [catalog.get(name) for name in request.kernels] or forward
    earlier = {(row["case"], row["batch"]): row for row in request.earlier}
    with request.peer("cudnn", cudnn.Peer) as peer:
        for case in request.cases:
            for batch in request.batches:
                empty = {"case": case, "batch": batch, "ms": {}, "errors": {}}
                row = earlier.get((case, batch), empty)
                _fill(gpu, shapes.find(case, batch), row, kernels, peer, request.repeat)
                yield row


def _fill(
    gpu: device.Gpu,
    problem: ConvProblem,
    row: Row,
    kernels: list[Kernel],
    peer: cudnn.Peer | None,
    samples: int,
) -> None:
    """Measure what a row lacks."""
    with cuda_timer.bench(gpu, problem) as bench:
        for kernel in kernels:
            if kernel.name in row["ms"] or kernel.why_not(problem, gpu.capability) is not None:
                continue
            failures = row.setdefault("failures", {})
            failures.pop(kernel.name, None)
            try:
                timing = bench.time(kernel, samples)
            except Ece408Error as error:
                failures[kernel.name] = str(error)
                continue
            row["ms"][kernel.name] = summary(timing.samples_ms)
            row["errors"][kernel.name] = timing.error
            if timing.failure:
                failures[kernel.name] = timing.failure
        if peer is not None and not any(who.startswith("cudnn") for who in row["ms"]):
            cudnn.add(row, peer.measure(problem, samples))
