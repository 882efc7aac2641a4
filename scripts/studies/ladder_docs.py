"""Writes what was measured into the kernels' headers and the table of kernels/README.md."""

from __future__ import annotations

import re
from pathlib import Path

from ece408_op.backends.cuda.kernel_plan import Kernel
from ece408_op.backends.cuda.kernels.catalog import KERNELS
from ece408_op.bench import cuda_report
from ece408_op.files import markdown

BEGIN, END = "<!-- ladder: begin -->", "<!-- ladder: end -->"
_MEASURED = re.compile(r"^// Measured: .*(?:\n// .+)*$", re.M)


def header(source: str, kernel: Kernel, document: dict) -> str:
    """A kernel's source with its measured effect in the header."""
    if kernel.direction != "forward":
        line = "// Measured: no, it is not on the ladder."
    elif not any(kernel.name in each["kernels"] for each in document["results"].values()):
        line = "// Measured: not yet."
    else:
        effect = cuda_report.measured(document["results"], kernel.name)
        gpu = " and ".join(document["machine"]["gpus"])
        line = f"// Measured: {effect}; batch {_batch(document)}, {gpu}."
    return _MEASURED.sub(_wrapped(line), source, count=1)


def readme(text: str, document: dict) -> str:
    """kernels/README.md with the ladder's table and the other kernels between its marks."""
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    others = [(kernel.name, kernel.summary) for kernel in KERNELS if kernel not in _LADDER]
    gpu = " and ".join(document["machine"]["gpus"])
    parts = [
        cuda_report.tree(),
        f"Median milliseconds at batch {_batch(document)} on one {gpu}; a step is over the kernel "
        "above it in the tree.",
        cuda_report.ladder(document["results"]),
        "And beside the ladder:",
        markdown.table(["kernel", "what it does"], others),
    ]
    return f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{after}"


def outdated(kernels: Path, document: dict) -> dict[Path, str]:
    """Headers and README below `kernels` that are out of date, with the text for each."""
    texts = {kernels / "README.md": readme((kernels / "README.md").read_text(), document)}
    for kernel in KERNELS:
        path = kernels / "cuda" / kernel.source
        if path.stem != kernel.name:
            # It is another kernel's source, with macros.
            continue
        texts[path] = header(path.read_text(), kernel, document)
    return {path: text for path, text in texts.items() if path.read_text() != text}


_LADDER = cuda_report.LADDER


def _batch(document: dict) -> int:
    return document["results"][cuda_report.STEPS[0]]["batch"]


def _wrapped(line: str) -> str:
    """A comment in lines of at most 100 characters."""
    lines, rest = [], line
    while len(rest) > 100:
        cut = rest.rindex(" ", 0, 100)
        lines.append(rest[:cut])
        rest = f"// {rest[cut + 1 :]}"
    return "\n".join([*lines, rest])
