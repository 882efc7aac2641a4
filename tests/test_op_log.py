from ece408_op import op_times
from ece408_op.op_log import OpTime, OpTimes, publish
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem.parse("b2,c1,h9,w9,m3,k5")
ENTRY = OpTime("conv1", PROBLEM, "backward_data", "cpu", "fast", 0.0015)


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
    assert row.split() == ["conv1", "backward_data", "cpu", "fast", "float32", "1.500", problem]


def test_a_notebook_shows_a_table():
    problem = ConvProblem.parse("b1,c1,h5,w5,m1,k3")
    log = OpTimes([OpTime("<first>", problem, "forward", "cpu", "direct", 0.0015)])
    shown = log._repr_html_()
    assert shown.startswith("<table><thead><tr><th>layer</th><th>direction</th>")
    assert "<td>&lt;first&gt;</td><td>forward</td>" in shown
    assert "<td>1.500</td><td>b1,c1,h5,w5,m1,k3x3</td></tr></tbody></table>" in shown
