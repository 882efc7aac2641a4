"""Ladder of the CUDA kernels on a term's layers, beside cuDNN if a Python with PyTorch is given."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from .. import settings
from ..backends.cuda.kernel_plan import Kernel
from ..backends.cuda.runtime import device
from ..bench import cuda_timer
from ..bench.cuda_report import LADDER
from ..bench.peers import cudnn
from ..errors import Ece408Error
from ..files.resources import kernels_dir
from ..host.gpu import find_driver
from ..problem import ConvProblem
from ..profile import gpu_ceilings
from .ladder import Ladder, Step

SAMPLES = 7


def measure(layers: Mapping[str, ConvProblem], peer_python: str | None) -> Ladder:
    """Measure the kernels alone, by CUDA events.

    Notes list kernels without a time. Raises `NoUsableGpu`, `NotEnoughMemory`, and the errors of
    measuring ceilings and of the peer.
    """
    gpu = device.get(settings.devices()[0])
    timings: dict[str, dict[str, list[float]]] = {kernel.name: {} for kernel in LADDER}
    notes = [f"Medians of {SAMPLES} runs of the kernel alone, by CUDA events."]
    for layer, problem in layers.items():
        with cuda_timer.bench(gpu, problem) as bench:
            for kernel in LADDER:
                samples, reason = _time(bench, kernel)
                if samples:
                    timings[kernel.name][layer] = samples
                else:
                    notes.append(f"{kernel.name} has no time on {layer}: {reason}.")
    top = gpu_ceilings.measure(gpu)
    peers = _peers(layers, peer_python, notes)
    # Older GPUs lack some tensor cores.
    rates = {
        "half precision on tensor cores": top.fp16_gflops,
        "TF32 on tensor cores": top.tf32_gflops,
        "float32": top.fp32_gflops,
    }
    return Ladder(
        device=find_driver().gpus[0].name,
        batch=next(iter(layers.values())).batch,
        layers={layer: str(problem) for layer, problem in layers.items()},
        steps=tuple(_step(each, timings[each.name]) for each in LADDER if timings[each.name]),
        peers=peers,
        gflops={name: rate for name, rate in rates.items() if rate},
        gbs={"copy": top.copy_gbs},
        floors_ms={layer: _floor_ms(problem, top) for layer, problem in layers.items()},
        notes=tuple(notes),
    )


def _time(bench: cuda_timer.Bench, kernel: Kernel) -> tuple[list[float], str | None]:
    """Return the milliseconds of each run, or none and the reason."""
    reason = kernel.why_not(bench.problem, bench.gpu.capability)
    if reason is not None:
        return [], reason
    try:
        timing = bench.time(kernel, SAMPLES)
    except Ece408Error as error:
        return [], str(error)
    return ([], timing.failure) if timing.failure else (timing.samples_ms, None)


def _step(kernel: Kernel, samples_ms: dict[str, list[float]]) -> Step:
    source = (kernels_dir() / "cuda" / kernel.source).read_text(encoding="utf-8")
    accurate = kernel.float32_accurate
    return Step(kernel.name, kernel.summary, accurate, samples_ms, what_changed(source))


def what_changed(source: str) -> str:
    """Return the paragraphs of a kernel's header between its title and the line "Measured"."""
    head = itertools.takewhile(lambda line: line.startswith("//"), source.splitlines())
    paragraphs = "\n".join(line[2:].strip() for line in head).split("\n\n")
    told = (each for each in paragraphs[1:] if not each.startswith("Measured"))
    return "\n\n".join(" ".join(each.split()) for each in told)


def _floor_ms(problem: ConvProblem, top: gpu_ceilings.GpuCeilings) -> float:
    """Return the larger of the times to move the bytes and to compute at float32 accuracy."""
    return max(problem.bytes / top.copy_gbs, problem.flops / top.gflops("float32")) / 1e6


def _peers(
    layers: Mapping[str, ConvProblem], python: str | None, notes: list[str]
) -> tuple[Step, ...]:
    if python is None:
        return ()
    samples: dict[str, dict[str, list[float]]] = {}
    with cudnn.Peer(python) as peer:
        about = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
        for layer, problem in layers.items():
            for variant, timing in peer.measure(problem, SAMPLES).items():
                if "samples_ms" in timing:
                    samples.setdefault(variant, {})[layer] = timing["samples_ms"]
                else:
                    notes.append(f"cuDNN {variant} has no time on {layer}: {timing['failure']}.")
    notes.append(f"cuDNN through PyTorch, in a separate process ({about}).")
    return tuple(
        Step(f"cuDNN {variant}", "through PyTorch", "float32" in variant, times)
        for variant, times in samples.items()
    )
