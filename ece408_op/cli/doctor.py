"""`ece408 doctor`: reports what is installed and usable here, with a hint for the rest.

Exit codes of the command: 0 when all milestones can run, `EXIT_CPU_ONLY` (20) when only those on
the CPU can, `EXIT_NOTHING` (21) when not even those can. Milestone m1.2, which needs an MXNet built
for this machine's GPU, does not count; the last line says when it is the exception.

Each item is a separate check. An error in one becomes its finding, so the other checks still run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..course.milestone import MILESTONES
from . import arguments
from .colour import paint
from .doctor_checks import BUILD, CHECKS, CPU, GPU, MISSING, MXNETS_GPU_CODE, NOTE, OK, Finding, run

EXIT_CPU_ONLY = 20
EXIT_NOTHING = 21

_MARKS = {OK: "ok", MISSING: "--", NOTE: "  "}
_COLOURS = {OK: "green", MISSING: "red", NOTE: "yellow"}


def _milestones(on_gpu: bool) -> str:
    return ", ".join(each.name for each in MILESTONES.values() if each.on_gpu == on_gpu)


_TITLES = {
    CPU: "To run on the CPU",
    BUILD: "Only to build from source, for kernels of your own, and for CUDA without a GPU",
    GPU: "Only to compute on a GPU",
}
_CONCLUSIONS = {
    CPU: f"CPU milestones ({_milestones(on_gpu=False)}) and your models",
    BUILD: "kernels of your own",
    GPU: f"GPU milestones ({_milestones(on_gpu=True)})",
}
_CPU_NEEDS = (
    *("Python", "NumPy", "SciPy", "MXNet", "CPU kernels", "Fashion-MNIST", "models"),
    "cache folder",
)
# Findings that each purpose requires; any GPU counts. nvcc calls the C++ compiler, even if it has
# no host code to compile.
_NEEDS = {
    CPU: _CPU_NEEDS,
    BUILD: ("C++ compiler",),
    GPU: (
        *(*_CPU_NEEDS, "CUDA kernels", "C++ compiler", "CUDA compiler"),
        *("NVIDIA driver", "GPU", "PyCUDA"),
    ),
}


@dataclass(frozen=True)
class Diagnosis:
    """The findings for each purpose of an installation, and their conclusion."""

    by_purpose: Mapping[str, Sequence[Finding]]

    @property
    def findings(self) -> list[Finding]:
        """All findings."""
        return [each for found in self.by_purpose.values() for each in found]

    def ready(self, purpose: str) -> bool:
        """Return whether the requirements of "cpu", "build" or "gpu" are met: the milestones on the
        CPU, the user's own kernels, the milestones on the GPU (except MXNet's own)."""
        return not self._unmet(purpose)

    @property
    def exit_code(self) -> int:
        """0, `EXIT_CPU_ONLY` or `EXIT_NOTHING`."""
        if self.ready(GPU):
            return 0
        return EXIT_CPU_ONLY if self.ready(CPU) else EXIT_NOTHING

    def text(self) -> str:
        """Return for each purpose its findings in aligned lines, with hints, then what can run."""
        width = max((len(finding.name) for finding in self.findings), default=0)
        lines = []
        for purpose, findings in self.by_purpose.items():
            lines.append(f"{_TITLES[purpose]}:")
            for finding in findings:
                mark = paint(_MARKS[finding.status], _COLOURS[finding.status], sys.stdout)
                line = f"{mark}  {finding.name:{width}}  {finding.detail}"
                lines.append(line.rstrip())
                if finding.hint:
                    lines.append(f"{'':{width + 6}}-> {finding.hint}")
            lines.append("")
        return "\n".join([*lines, *map(self._conclusion, _CONCLUSIONS)])

    def json(self) -> dict[str, Any]:
        """Return the diagnosis as strings, booleans, lists and dicts."""
        return {
            "findings": [
                {**dataclasses.asdict(finding), "purpose": purpose}
                for purpose, findings in self.by_purpose.items()
                for finding in findings
            ],
            **{f"{purpose}_ready": self.ready(purpose) for purpose in _CONCLUSIONS},
        }

    def _unmet(self, purpose: str) -> list[str]:
        usable = {
            re.sub(r"^GPU \d+$", "GPU", finding.name)
            for finding in self.findings
            if finding.status != MISSING
        }
        return [need for need in _NEEDS[purpose] if need not in usable]

    def _conclusion(self, purpose: str) -> str:
        unmet = self._unmet(purpose)
        verdict = f"cannot run: needs {', '.join(unmet)}" if unmet else "can run"
        if purpose == GPU and not unmet:
            verdict += self._exception()
        return f"{_CONCLUSIONS[purpose]}: {verdict}"

    def _exception(self) -> str:
        """Return the end of the sentence if MXNet's own convolution cannot run on the GPU."""
        if any(each.name == MXNETS_GPU_CODE and each.status == OK for each in self.findings):
            return ""
        names = [m.name for m in MILESTONES.values() if m.on_gpu and not m.own_operator]
        return f", except {', '.join(names)}, which needs {MXNETS_GPU_CODE} for this GPU"


def diagnose() -> Diagnosis:
    """Run all checks. Raises and fetches nothing, and creates nothing but the emulator's compiled
    files, in an existing cache."""
    return Diagnosis(
        {
            purpose: [found for name, check in checks.items() for found in run(name, check)]
            for purpose, checks in CHECKS.items()
        }
    )


def add(commands: Any) -> None:
    """Add `ece408 doctor`."""
    parser = arguments.add_command(
        commands,
        "doctor",
        "report what is installed and usable here, and what to do about the rest",
        epilog="exit codes: 0: all milestones can run (except perhaps m1.2, which needs an MXNet "
        f"built for the GPU: the last line says so); {EXIT_CPU_ONLY}: only those on the CPU can; "
        f"{EXIT_NOTHING}: not even those can",
    )
    parser.option("--json", "print the findings as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    diagnosis = diagnose()
    print(json.dumps(diagnosis.json(), indent=2) if options.json else diagnosis.text())
    return diagnosis.exit_code
