"""One sentence on a kernel's limit, from the GPU's counters."""

import math

import pytest
from cases import every

from ece408_op.profile import kernel_limits

# An unremarkable kernel: half of everything.
PLAIN = {
    **dict.fromkeys(("waves", "limit_registers", "limit_shared", "limit_warps"), 8.0),
    **{"limit_blocks": 32.0, "threads": 256.0, "blocks": 1000.0, "registers": 40.0},
    **dict.fromkeys(("possible_warps", "warps"), 75.0),
    **dict.fromkeys(("memory", "issue", "fma", "l1", "shared"), 50.0),
    **{"tensor": 0.0, "wavefronts": 1000.0, "conflicts": 0.0, "sectors": 4000.0},
    **{"requests": 1000.0, "local_loads": 0.0, "local_stores": 0.0, "ms": 1e6},
    **{"read": 2e9, "written": 1e9, "static_shared": 1024.0, "dynamic_shared": 0.0},
    **dict.fromkeys(kernel_limits.STALLS, 0.1),
    **{"long_scoreboard": 3.0},
}
SENTENCES = (
    ({}, "latency: warps wait mostly for global memory"),
    ({"waves": 0.2, "blocks": 24}, "too few blocks: 24 leave most of the GPU idle"),
    ({"memory": 82}, "memory bandwidth: it moves 3.00 GB at 82 % of the peak rate"),
    ({"fma": 75}, "arithmetic: multiply-adds (FMA) are at 75 % of their peak rate"),
    ({"tensor": 90}, "arithmetic: tensor cores are at 90 %"),
    ({"local_loads": 300}, "register spills: 0.3 accesses to local memory for each load"),
    ({"sectors": 16000}, "uncoalesced loads: a warp's load takes 16 sectors"),
    ({"conflicts": 400}, "bank conflicts: 40% of accesses to shared memory are repeats"),
    ({"shared": 80}, "shared memory, at 80 % of its peak rate"),
    ({"l1": 76}, "the L1 cache, at 76 % of its peak rate"),
    ({"issue": 84, "fma": 20}, "instruction issue, at 84 % of its peak rate, and multiply-adds"),
    (
        {"possible_warps": 25, "limit_registers": 2},
        "low occupancy: the number of registers allows 25 % of a multiprocessor's warps",
    ),
    (dict.fromkeys(kernel_limits.STALLS, math.nan), "wait mostly for what no counter tells"),
)


def _row(name="conv(float *, const float *)", **changes):
    """Return a launch in ncu's format."""
    figures = {**PLAIN, **changes}
    metrics = {metric: f"{figures[key]:,}" for key, metric in kernel_limits._METRICS.items()}
    return {"Kernel Name": name, **metrics}


@every(case=SENTENCES)
def test_one_sentence(case):
    changes, sentence = case
    (found,) = kernel_limits.of([_row(**changes)])
    assert sentence in found.sentence


def test_the_function_with_the_most_time_comes_first():
    rows = [_row("unroll(int)", ms=2e6), _row("multiply", ms=1.5e6), _row("multiply", ms=1.8e6)]
    first, second = kernel_limits.of(rows)
    assert (first.name, first.launches, first.figures["ms"]) == ("multiply", 2, 1.8)
    assert first.share == pytest.approx(3.3 / 5.3)
    assert second.name == "unroll"
    assert kernel_limits.columns(second)["ms"] == "2.000"
    assert kernel_limits.columns(second)["sectors/load"] == "4.0"


def test_a_kernel_that_loads_nothing_has_figures():
    (found,) = kernel_limits.of([_row(requests=0.0, sectors=0.0, wavefronts=0.0)])
    assert kernel_limits.columns(found)["sectors/load"] == "0.0"
    assert kernel_limits.columns(found)["conflicts"] == "0%"
