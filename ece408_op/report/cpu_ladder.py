"""Ladder of the CPU's kernels on a term's layers: the textbook loops, then each instruction set."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from .. import settings
from ..backends.cpu import native
from ..bench import ceilings, cpu_timer
from ..operator.environment import cpu_model
from ..problem import ConvProblem
from .ladder import Ladder, Step

SAMPLES = 5
_IDEAS = {
    "reference": "the textbook loops, sums in double precision",
    "baseline": "tiles of filters by pixels in registers, vectors of 4 floats",
    "avx2": "the same with vectors of 8 floats and fused multiply-adds",
    "avx512": "the same with vectors of 16 floats",
}
_WHY = {
    "reference": "One output element after the other, each a sum over channels and taps. Every "
    "multiplication loads both of its operands, and there are no vectors.",
    "baseline": "A thread computes some filters on some neighbouring vectors of pixels at once and "
    "keeps their sums in registers: a pixel that is loaded serves several filters, a weight "
    "several vectors. Outputs too large for the caches are stored past them.",
    "avx2": "Twice the lanes, and one instruction for a multiplication and its addition.",
    "avx512": "Twice the lanes again, and 32 registers instead of 16, which allow larger tiles.",
}
# By the names of `cpu_timer`.
_PEERS = {
    "mxnet": ("MXNet's Convolution", "oneDNN"),
    "torch NCHW": ("PyTorch NCHW", "in a separate process"),
    "torch NHWC": ("PyTorch NHWC", "in a separate process"),
}


def measure(layers: Mapping[str, ConvProblem], peer_python: str | None) -> Ladder:
    """Measure times on touched arrays, which need no fresh pages.

    Raises `WrongResult` for an incorrect kernel, and the errors of the backends and of the peer.
    """
    peer = cpu_timer.TorchPeer(peer_python) if peer_python else contextlib.nullcontext()
    with peer as torch:
        return _measure(layers, torch)


def _measure(layers: Mapping[str, ConvProblem], torch: cpu_timer.TorchPeer | None) -> Ladder:
    isas = tuple(reversed(native.isas()))
    before = _ceilings(isas)
    samples: dict[str, dict[str, list[float]]] = {}
    kernels: dict[str, dict[str, str]] = {}
    for layer, problem in layers.items():
        times, names = cpu_timer.by_isa(problem, isas, torch, SAMPLES)
        for isa, kernel in names.items():
            kernels.setdefault(isa, {})[layer] = kernel.removesuffix(f"_{isa}")
        for name, each in times.items():
            samples.setdefault(name, {})[layer] = each
    tops = {isa: top.best(before[isa]) for isa, top in _ceilings(isas).items()}
    best = tops[isas[-1]]
    problem = next(iter(layers.values()))
    return Ladder(
        device=cpu_model(),
        batch=problem.batch,
        layers={layer: str(each) for layer, each in layers.items()},
        steps=tuple(
            Step(n, _IDEAS[n], True, samples[n], _WHY[n], computed_by=kernels.get(n, {}))
            for n in ("reference", *isas)
        ),
        peers=tuple(
            Step(*shown, True, samples[name]) for name, shown in _PEERS.items() if name in samples
        ),
        gflops={isa: top.gflops for isa, top in tops.items()},
        gbs={"reads": best.read_gbs, "stores": best.store_gbs},
        floors_ms={layer: best.floor_ms(each) for layer, each in layers.items()},
        notes=(
            f"{settings.threads()} threads; medians of {SAMPLES} runs, one of the textbook loops; "
            "outputs in touched memory.",
            *(_computed_by(layer, kernels) for layer in layers),
        ),
    )


def _computed_by(layer: str, kernels: Mapping[str, Mapping[str, str]]) -> str:
    """Return a sentence that names the kernel of a layer, by instruction set if they differ."""
    names = {isa: of_layer[layer] for isa, of_layer in kernels.items()}
    if len(set(names.values())) > 1:
        return f"{layer} is computed by {', '.join(f'{n} ({isa})' for isa, n in names.items())}."
    name = next(iter(names.values()))
    fewer = ", which multiplies less than the textbook loops" if name == "winograd" else ""
    return f"{layer} is computed by {name}{fewer}, by every instruction set."


def _ceilings(isas: tuple[str, ...]) -> dict[str, ceilings.Ceilings]:
    return {isa: ceilings.measure(isa, settings.threads()) for isa in isas}
