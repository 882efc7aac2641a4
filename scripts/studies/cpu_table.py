"""The CPU benchmark's results as Markdown: tables of milliseconds, floors and ratios."""

from __future__ import annotations

from typing import Any

from ece408_op.bench.ceilings import Ceilings
from ece408_op.errors import InvalidSetting
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

README_BEGIN = "<!-- docs/results/cpu.json: times -->"
README_END = "<!-- end of times -->"


# By contender, a summary in ms.
Times = dict[str, dict[str, float]]


def median(times: Times, name: str) -> float | None:
    """A contender's median in ms, or `None` if it did not run."""
    return times[name]["median"] if name in times else None


def best_torch(times: Times) -> float | None:
    """The better layout's median in ms."""
    found = [m for m in (median(times, f"torch {la}") for la in ("NCHW", "NHWC")) if m is not None]
    return min(found) if found else None


def ceilings(document: dict[str, Any]) -> Ceilings:
    """What the machine did in the same run, all threads, the best instruction set."""
    return Ceilings(**document["ceilings"])


def tables(document: dict[str, Any]) -> str:
    """Every table of the document."""
    top = ceilings(document)
    parts = [
        f"Ceilings in this run, {document['threads']} threads: {top.gflops:.0f} GFLOP/s of "
        f"multiply-adds, {top.store_gbs:.0f} GB/s stored, {top.read_gbs:.0f} GB/s read, "
        f"{top.fresh_gbs:.1f} GB/s stored where pages must be made first. Medians of "
        f"{document['samples']} runs in ms; outputs are warm but for those called fresh. "
        "PyTorch: the better of NCHW and NHWC, its memory kept warm. Floors and GFLOP/s count all "
        "multiply-adds; `winograd` does fewer.",
        "## Forward",
        markdown.table(_FORWARD_HEAD, [_forward_row(top, e) for e in document["forward"]]),
    ]
    if document["unlisted"]:
        parts += [
            "## Shapes that no kernel was tuned for",
            markdown.table(
                [*_FORWARD_HEAD, "share of floor / nearest's"],
                [_unlisted_row(top, document, e) for e in document["unlisted"]],
            ),
        ]
    if document["backward"]:
        parts += [
            "## Backward: both gradients",
            markdown.table(_BACKWARD_HEAD, [_backward_row(top, e) for e in document["backward"]]),
        ]
    if document["variants"]:
        parts += ["## Instruction sets and threads", _variants(document)]
    return "\n\n".join(parts)


_FORWARD_HEAD = [
    *("shape", "problem", "floor", "ours", "GFLOP/s", "of floor", "MXNet", "x", "PyTorch", "x"),
    *("fresh: floor", "ours", "MXNet", "error"),
]
_BACKWARD_HEAD = ["shape", "problem", "floor", "ours", "GFLOP/s", "MXNet", "x", "PyTorch", "x"]


def _forward_row(top: Ceilings, entry: dict[str, Any]) -> list[str]:
    problem, times = ConvProblem.parse(entry["problem"]), entry["ms"]
    ours = times["ours"]["median"]
    return [
        *(entry["name"], f"`{problem}`", f"{top.floor_ms(problem):.1f}", f"{ours:.1f}"),
        *(f"{problem.flops / ours / 1e6:.0f}", f"{top.floor_ms(problem) / ours:.0%}"),
        *_peer(median(times, "mxnet"), ours),
        *_peer(best_torch(times), ours),
        f"{top.floor_ms(problem, fresh=True):.1f}",
        *(_ms(median(times, "ours fresh")), _ms(median(times, "mxnet fresh"))),
        f"{entry['error']:.1e}",
    ]


def _unlisted_row(top: Ceilings, document: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    row = _forward_row(top, entry)
    nearest = next((e for e in document["forward"] if e["name"] == entry["nearest"]), None)
    if nearest is None:
        return [*row, ""]
    shares = [
        top.floor_ms(ConvProblem.parse(e["problem"])) / e["ms"]["ours"]["median"]
        for e in (entry, nearest)
    ]
    return [*row, f"{shares[0] / shares[1]:.2f} ({entry['nearest']})"]


def _backward_row(top: Ceilings, entry: dict[str, Any]) -> list[str]:
    problem, times = ConvProblem.parse(entry["problem"]), entry["ms"]
    ours = times["ours"]["median"]
    return [
        *(entry["name"], f"`{problem}`", f"{2 * top.compute_ms(problem):.1f}", f"{ours:.1f}"),
        f"{2 * problem.flops / ours / 1e6:.0f}",
        *_peer(median(times, "mxnet"), ours),
        *_peer(best_torch(times), ours),
    ]


def _variants(document: dict[str, Any]) -> str:
    names = list(document["variants"][0]["ms"])
    head = ["shape", "problem", *names]
    rows = []
    for entry in document["variants"]:
        medians = [_ms(median(entry["ms"], name)) for name in names]
        rows.append([entry["name"], f"`{entry['problem']}`", *medians])
    return markdown.table(head, rows)


def readme_table(document: dict[str, Any]) -> str:
    """The README's extract: each listed shape's time and how many times faster it is."""
    rows = []
    for entry in document["forward"]:
        times = entry["ms"]
        ours = times["ours"]["median"]
        problem = ConvProblem.parse(entry["problem"])
        share = f"{ceilings(document).floor_ms(problem) / ours:.0%}"
        native, torch = _peer(median(times, "mxnet"), ours), _peer(best_torch(times), ours)
        rows.append([entry["name"], f"`{problem}`", f"{ours:.0f} ms", share, native[1], torch[1]])
    head = ["layer", "problem", "time", "of the floor", "MXNet takes", "PyTorch takes"]
    return markdown.table(head, rows)


def with_table(text: str, document: dict[str, Any]) -> str:
    """The README's text with a new table. Raises `InvalidSetting` without the markers."""
    if text.count(README_BEGIN) != 1 or text.count(README_END) != 1:
        raise InvalidSetting(f"the text lacks the lines {README_BEGIN} and {README_END}")
    before, rest = text.split(README_BEGIN)
    after = rest.split(README_END)[1]
    return f"{before}{README_BEGIN}\n{readme_table(document)}\n{README_END}{after}"


def _peer(milliseconds: float | None, ours: float) -> tuple[str, str]:
    if milliseconds is None:
        return "", ""
    return _ms(milliseconds), f"{milliseconds / ours:.1f}x"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
