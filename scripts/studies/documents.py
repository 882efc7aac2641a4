"""Measured times in documents: the kernels' headers, kernels/README.md, and README.md."""

from __future__ import annotations

import re
from pathlib import Path

from ece408_op.backends.cuda.kernel_plan import Kernel
from ece408_op.backends.cuda.kernels.catalog import KERNELS
from ece408_op.bench import cuda_report, results, shapes
from ece408_op.errors import InvalidSetting
from ece408_op.files import markdown

LADDER = ("<!-- ladder: begin -->", "<!-- ladder: end -->")
TIMES = ("<!-- docs/results/cpu.json: times -->", "<!-- end of times -->")
_MEASURED = re.compile(r"^// Measured: .*(?:\n// .+)*$", re.M)


def header(source: str, kernel: Kernel, document: dict) -> str:
    """Return a kernel's source with its measured effect in the header."""
    if kernel.direction != "forward":
        line = "// Measured: no, it is not on the ladder."
    elif not any(kernel.name in row["ms"] for row in document["rows"]):
        line = "// Measured: not yet."
    else:
        effect = cuda_report.measured(document["rows"], kernel.name)
        gpu = " and ".join(document["machine"]["gpus"])
        line = f"// Measured: {effect}; batch {_batch(document)}, {gpu}."
    return _MEASURED.sub(_wrapped(line), source, count=1)


def ladder(document: dict) -> str:
    """Return the generated part of kernels/README.md: the ladder, and the other kernels."""
    beside = [
        (kernel.name, kernel.summary) for kernel in KERNELS if kernel not in cuda_report.LADDER
    ]
    gpu = " and ".join(document["machine"]["gpus"])
    parts = [
        cuda_report.tree(),
        f"Median milliseconds at batch {_batch(document)} on one {gpu}; a step is over the kernel "
        "above it in the tree.",
        cuda_report.ladder(document["rows"]),
        "And beside the ladder:",
        markdown.table(["kernel", "what it does"], beside),
    ]
    return "\n\n".join(parts)


def times(document: dict) -> str:
    """Return the generated part of README.md: each of the course's layers forward on the CPU."""
    lines = []
    for row in document["rows"]:
        if row["direction"] == "forward" and row["case"] in shapes.SHAPES:
            ours, peers = row["ms"][results.OURS]["median"], results.peers(row)
            others = [f"{peers[name] / ours:.1f}x" for name in ("mxnet", "torch")]
            problem = shapes.find(row["case"], row["batch"])
            fraction = f"{row['floor_ms'] / ours:.0%}"
            lines.append([row["case"], f"`{problem}`", f"{ours:.0f} ms", fraction, *others])
    head = ["layer", "problem", "time", "of the floor", "MXNet takes", "PyTorch takes"]
    return markdown.table(head, lines)


def between(text: str, marks: tuple[str, str], new: str) -> str:
    """Return the text with new content between two marks. Raises `InvalidSetting` without the
    marks."""
    if any(text.count(mark) != 1 for mark in marks):
        raise InvalidSetting(f"the text lacks the lines {marks[0]} and {marks[1]}")
    before, rest = text.split(marks[0])
    return f"{before}{marks[0]}\n{new}\n{marks[1]}{rest.split(marks[1])[1]}"


def outdated(root: Path, cpu: dict, cuda: dict) -> dict[Path, str]:
    """Return documents of a checkout that differ from the measurements, with the new text of
    each."""
    kernels, readme = root / "kernels" / "README.md", root / "README.md"
    texts = {
        kernels: between(kernels.read_text(), LADDER, ladder(cuda)),
        readme: between(readme.read_text(), TIMES, times(cpu)),
    }
    for kernel in KERNELS:
        path = root / "kernels" / "cuda" / kernel.source
        if path.stem != kernel.name:
            # Variants of a kernel by macros have no header.
            continue
        texts[path] = header(path.read_text(), kernel, cuda)
    return {path: text for path, text in texts.items() if path.read_text() != text}


def _batch(document: dict) -> int:
    return next(row["batch"] for row in document["rows"] if row["case"] == cuda_report.STEPS[0])


def _wrapped(line: str) -> str:
    """Return a comment in lines of at most 100 characters."""
    lines, rest = [], line
    while len(rest) > 100:
        cut = rest.rindex(" ", 0, 100)
        lines.append(rest[:cut])
        rest = f"// {rest[cut + 1 :]}"
    return "\n".join([*lines, rest])
