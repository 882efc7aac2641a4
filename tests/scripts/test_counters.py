"""What ncu's log becomes; reading counters needs a GPU and is left to the script."""

from __future__ import annotations

import json
import math

import pytest
from studies import counters

from ece408_op.profile import ncu

RAN = json.dumps(
    [
        {
            **{"shape": "a", "precision": "float32", "kernel": "4_im2col"},
            **{"floor_ms": 0.5, "launches": 2},
        },
        {
            **{"shape": "b", "precision": "tf32", "kernel": "10_tf32"},
            **{"floor_ms": 0.3, "launches": 1},
        },
    ]
)
LOG = (
    "==PROF== Connected to process 7\n"
    '"ID","Kernel Name","gpu__time_duration.sum","sm__cycles_elapsed.avg.per_second",'
    '"dram__bytes_read.sum","launch__registers_per_thread",'
    '"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"\n'
    '"","","ns","hz","byte","register/thread","inst"\n'
    '"0","unroll","1,000","1500000000","2000000000","40","0.5"\n'
    '"1","multiply","2,500,000","1750000000","1000000000","64","4.5"\n'
    '"2","convolve","600,000","1980000000","3000000000","128","n/a"\n'
)


def test_the_longest_launch_of_each_kernel_counts_in_the_order_they_ran():
    first, second = counters.parse(f"a word\n{RAN}\n", ncu.rows(LOG))
    assert (first.shape, first.precision, first.kernel) == ("a", "float32", "4_im2col")
    assert first.figures["ms"] == pytest.approx(2.5)
    assert first.figures["registers"] == 64
    assert first.figures["read_gb"] == pytest.approx(1.0)
    assert second.figures["ms"] == pytest.approx(0.6)
    assert second.figures["clock_ghz"] == pytest.approx(1.98)
    assert math.isnan(second.figures["barrier"])
    assert math.isnan(second.figures["fma"])


def test_the_table_says_what_warps_wait_for_the_longest():
    rows = counters.parse(RAN, ncu.rows(LOG))
    table = counters.table(rows).splitlines()
    assert table[-2].startswith("| a float32 | 4_im2col | 2.500 | 0.500 | 20 % | 1.75 |")
    assert table[-2].endswith("| other warps 4.5 |")
    assert table[-1].startswith("| b tf32 | 10_tf32 | 0.600 | 0.300 | 50 % | 1.98 |")
