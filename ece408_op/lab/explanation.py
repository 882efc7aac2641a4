"""Performance explanation of a CUDA kernel: resources, and the GPU's counters."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .. import settings
from ..backends.cuda import cuda_file_backend, work
from ..backends.cuda.kernel_plan import ARCHITECTURES, Target, architecture
from ..backends.cuda.runtime import device, nvcc_compiler
from ..backends.cuda.runtime.nvcc_compiler import Resources
from ..backends.kernel_file import KernelFile
from ..errors import ProfilerMissing, ProfilingNotPermitted
from ..problem import ConvProblem
from ..profile import kernel_limits, ncu
from ..profile.demangle import demangle
from ..profile.kernel_limits import KernelLimits
from . import observed


@dataclass
class Explanation:
    """Explanation for a contender on a problem: counters of its functions, the slowest first; the
    compiler's resources of a file's functions, by name; and why there are no counters."""

    kernels: list[KernelLimits] = field(default_factory=list)
    resources: dict[str, Resources] = field(default_factory=dict)
    failure: str = ""

    @property
    def sentence(self) -> str:
        """Return a sentence on what limits the slowest function."""
        if self.kernels:
            return self.kernels[0].sentence
        spilled = {name: each for name, each in self.resources.items() if each.spilled_bytes}
        if spilled:
            name, most = max(spilled.items(), key=lambda item: item[1].spilled_bytes)
            return f"{name} spills registers: {most.spilled_bytes} bytes a thread"
        return ""


def explain(kernel: KernelFile | str, problem: ConvProblem) -> Explanation:
    """Run a file, or one of our kernels, once on a problem, under ncu. Raises what planning it
    raises."""
    found = Explanation()
    if isinstance(kernel, KernelFile):
        found.resources = resources(kernel, problem, device.get(settings.devices()[0]))
    with tempfile.TemporaryDirectory(prefix="ece408-ncu-") as folder:
        log = Path(folder) / "ncu.csv"
        try:
            command = ncu.prefix(ncu.find(), kernel_limits.METRICS, log)
            failure = observed.compute(kernel, command, [problem])
            said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            found.kernels = kernel_limits.of(ncu.read(said, failure or "no launches"))
        except (ProfilerMissing, ProfilingNotPermitted) as error:
            found.failure = str(error)
    return found


def plain_name(function: str) -> str:
    """Strip type, namespace and template arguments from a function's name."""
    return function.partition("<")[0].split()[-1].rpartition("::")[2]


def resources(kernel: KernelFile | str, problem: ConvProblem, gpu: Target) -> dict[str, Resources]:
    """Return the compiler's resources for the functions of a file, or of one of our kernels, on a
    problem and a GPU, by C++ name. Raises what planning it raises."""
    if isinstance(kernel, KernelFile) and kernel.form != "declared":
        name = architecture(ARCHITECTURES, gpu.capability) or ""
        commands = [[*cuda_file_backend.library_command(kernel, name), "-cubin"]]
    else:
        own = kernel if isinstance(kernel, str) else str(kernel.path)
        forward = work.forward(problem, 0, 0, None, 0, False, own)
        commands = [
            nvcc_compiler.plan_command(
                plan.kernel.source,
                plan.macros,
                architecture(plan.kernel.architectures, gpu.capability) or "",
            )
            for plan in forward.plans(gpu, problem.batch)
        ]
    return {
        demangle(symbol).partition("(")[0]: each
        for command in commands
        for symbol, each in nvcc_compiler.resources(tuple(command)).items()
    }
