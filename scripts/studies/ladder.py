"""The ladders of kernels: on the CPU the instruction sets, on a GPU every kernel beside cuDNN."""

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

from .asked import Asked

ABOUT_CPU = "Into memory that has been written before; of the textbook loops (reference) one run."
ABOUT_GPU = "Each kernel by itself, by events; cuDNN through PyTorch."


def rows_on_cpu(asked: Asked) -> Iterator[Row]:
    """A row for each case and batch."""
    isas = tuple(reversed(native.isas()))
    with asked.peer("torch", cpu_timer.TorchPeer) as peer:
        for case in asked.cases:
            for batch in asked.batches:
                problem = shapes.find(case, batch)
                times, _ = cpu_timer.by_isa(problem, isas, peer, asked.repeat)
                ms = {who: summary(samples) for who, samples in times.items()}
                yield {"case": case, "batch": batch, "ms": ms}


def rows_on_gpu(asked: Asked) -> Iterator[Row]:
    """A row for each case and batch, checked; what an earlier run has is not measured again."""
    gpu = device.get(asked.gpu)
    forward = [kernel for kernel in catalog.KERNELS if kernel.direction == "forward"]
    kernels = [catalog.get(name) for name in asked.kernels] or forward
    earlier = {(row["case"], row["batch"]): row for row in asked.earlier}
    with asked.peer("cudnn", cudnn.Peer) as peer:
        for case in asked.cases:
            for batch in asked.batches:
                empty = {"case": case, "batch": batch, "ms": {}, "errors": {}}
                row = earlier.get((case, batch), empty)
                _fill(gpu, shapes.find(case, batch), row, kernels, peer, asked.repeat)
                yield row


def _fill(
    gpu: device.Gpu,
    problem: ConvProblem,
    row: Row,
    kernels: list[Kernel],
    peer: cudnn.Peer | None,
    samples: int,
) -> None:
    """Measure what a row does not have yet."""
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
