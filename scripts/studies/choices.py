"""The kernels that run by default: times by batch, with cuDNN's at small ones; times and errors by
precision."""

from __future__ import annotations

import dataclasses
from typing import Any

from ece408_op.backends.cuda.kernels import catalog, tuned
from ece408_op.backends.cuda.runtime.device import Gpu
from ece408_op.bench.cuda_report import kept, median
from ece408_op.bench.cuda_timer import Bench, bench
from ece408_op.bench.peers.cudnn import Peer
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

SMALL = (1, 16)
LARGE = (100, 1000, 10000)
_SIMPLEST = "1_naive"
_PRECISIONS = ("float32", "tf32", "float16")

# By shape: "batches", {batch: timing} at float32; "cudnn", {batch: {variant: timing}};
# "precisions", {precision: timing} at the largest batch, and "simplest", the timing there of the
# simplest kernel. A timing has choice, ms (a summary), error and failure.
Entry = dict[str, dict[str, Any]]


def measure(gpu: Gpu, problem: ConvProblem, peer: Peer | None, samples: int) -> Entry:
    """One shape's entry. Raises the errors of compiling, loading and launching."""
    entry: Entry = {"batches": {}, "cudnn": {}, "precisions": {}, "simplest": {}}
    for batch in (*SMALL, *LARGE):
        at = dataclasses.replace(problem, batch=batch)
        with bench(gpu, at) as each:
            found = _timing(each, "float32", samples)
            entry["batches"][str(batch)] = found
            if batch == LARGE[-1]:
                entry["precisions"]["float32"] = found
                for precision in _PRECISIONS[1:]:
                    entry["precisions"][precision] = _timing(each, precision, samples)
                entry["simplest"] = kept(vars(each.time(catalog.get(_SIMPLEST), 1)))
        if peer is not None and batch in SMALL:
            measured = peer.measure(at, samples)
            entry["cudnn"][str(batch)] = {name: kept(found) for name, found in measured.items()}
    return entry


def _timing(each: Bench, precision: str, samples: int) -> dict[str, Any]:
    choice = tuned.best(each.problem, each.gpu, precision)
    plan = choice.kernel.plan(each.problem, each.gpu.capability, False, choice.layout)
    return {"choice": str(choice), **kept(vars(each.time(choice.kernel, samples, plan)))}


def tables(results: dict[str, Entry]) -> str:
    """Everything as Markdown."""
    return "\n\n".join(
        [
            "Float32, by batch: median milliseconds, and microseconds for each image:",
            _by_batch(results),
            "Small batches beside cuDNN's best at float32, median milliseconds; the factor is how "
            "many times faster ours is:",
            _small(results),
            f"By precision, batch {LARGE[-1]}: what runs when so much is permitted, median "
            "milliseconds, and the relative L2 error against float64, last as a multiple of the "
            "simplest float32 kernel's:",
            _by_precision(results),
        ]
    )


def _ms(timing: dict[str, Any] | None) -> str:
    ms = median(timing)
    return "failed" if ms is None else f"{ms:.3f}"


def _by_batch(results: dict[str, Entry]) -> str:
    titles = ["shape", "kernel and tiles at the largest batch"]
    titles += [f"{batch}, ms" for batch in LARGE] + [f"{batch}, us" for batch in LARGE]
    rows = []
    for shape, entry in results.items():
        timings = [entry["batches"][str(batch)] for batch in LARGE]
        each = [(median(timing), batch) for timing, batch in zip(timings, LARGE)]
        rows.append(
            [
                *(shape, timings[-1]["choice"], *map(_ms, timings)),
                *("" if ms is None else f"{1e3 * ms / batch:.3f}" for ms, batch in each),
            ]
        )
    return markdown.table(titles, rows)


def _small(results: dict[str, Entry]) -> str:
    titles = ["shape"]
    for batch in SMALL:
        titles += [f"batch {batch}: kernel and tiles", "ms", "cuDNN, ms", "factor"]
    rows = []
    for shape, entry in results.items():
        cells = [shape]
        for batch in SMALL:
            ours, peer = entry["batches"][str(batch)], _best_peer(entry, batch)
            ms = median(ours)
            factor = "" if peer is None or ms is None else f"{peer / ms:.2f}"
            cells += [ours["choice"], _ms(ours), "" if peer is None else f"{peer:.3f}", factor]
        rows.append(cells)
    return markdown.table(titles, rows)


def _best_peer(entry: Entry, batch: int) -> float | None:
    """cuDNN's least median of those at float32; `None` where it was not asked."""
    variants = entry["cudnn"].get(str(batch), {})
    found = [median(timing) for name, timing in variants.items() if name.endswith("float32")]
    return min((ms for ms in found if ms is not None), default=None)


def _by_precision(results: dict[str, Entry]) -> str:
    titles = ["shape", "simplest kernel's error"]
    for precision in _PRECISIONS:
        titles += [f"{precision}: kernel and tiles", "ms", "error", "multiple"]
    rows = []
    for shape, entry in results.items():
        simplest = entry["simplest"]["error"]
        cells = [shape, f"{simplest:.1e}"]
        for precision in _PRECISIONS:
            timing = entry["precisions"][precision]
            multiple = f"{timing['error'] / simplest:.1f}"
            cells += [timing["choice"], _ms(timing), f"{timing['error']:.1e}", multiple]
        rows.append(cells)
    return markdown.table(titles, rows)
