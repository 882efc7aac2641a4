"""Text summary of a profile: all of its tables."""

from __future__ import annotations

import shlex
from typing import Any

from . import kernel_figures, ncu, tables
from .activities import Profile
from .gpu_ceilings import GpuCeilings


def text(profile: Profile) -> str:
    """Return the non-empty tables of a profile, each under its title."""
    title = f"Profile of {shlex.join(profile.command)}: {profile.elapsed_s:.3f} s"
    parts = [
        f"{title}, exit code {profile.exit_code}" if profile.exit_code else title,
        *(f"{section.title}\n{tables.text(section.rows)}" for section in tables.sections(profile)),
    ]
    rates = rates_table(profile)
    if rates is not None:
        parts.append(f"Our kernels on the GPU\n{rates}")
    if profile.counters:
        counters = [
            ncu.Counters(**{**each, "block": tuple(each["block"])}) for each in profile.counters
        ]
        parts.append(f"Hardware counters by ncu, of a run of their own\n{ncu.table(counters)}")
    parts += [f"Note: {note}" for note in profile.notes]
    return "\n\n".join(parts)


def rates_table(profile: Profile) -> str | None:
    """Return the rates of our kernels on the GPU, or `None` for a profile without them."""
    if not profile.kernel_figures or profile.ceilings is None:
        return None
    found = [_figure(each) for each in profile.kernel_figures]
    return kernel_figures.table(found, GpuCeilings(**profile.ceilings))


def _figure(fields: Any) -> kernel_figures.Figure:
    functions = tuple(kernel_figures.FunctionFigure(**each) for each in fields["functions"])
    return kernel_figures.Figure(**{**fields, "functions": functions})
