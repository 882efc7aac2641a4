from __future__ import annotations

from ece408_op import op_times
from ece408_op.op_log import OpTime, publish
from ece408_op.problem import ConvProblem

ENTRY = OpTime("conv1", ConvProblem.parse("b2,c1,h9,w9,m3,k5"), "forward", "cpu", "fast", 0.0015)


def test_only_what_happens_inside_the_block_is_logged():
    seen = []
    publish(ENTRY)
    with op_times(seen.append) as outer:
        publish(ENTRY)
        with op_times() as inner:
            publish(ENTRY)
    publish(ENTRY)
    assert (len(outer), len(inner), len(seen)) == (2, 1, 2)


def test_table_has_a_line_for_each_call():
    with op_times() as log:
        publish(ENTRY)
    header, row = str(log).splitlines()
    columns = ["layer", "direction", "backend", "kernel", "precision", "ms", "problem"]
    assert header.split() == columns
    problem = "b2,c1,h9,w9,m3,k5x5"
    assert row.split() == ["conv1", "forward", "cpu", "fast", "float32", "1.500", problem]
