"""Tables of results."""

from ece408_op.bench import results


def test_a_table_has_each_peer_and_the_means():
    cases = {"slow": (2.0, 1.0), "fast": (1.0, 8.0), "next": (0.5, 1.0)}
    rows = [
        {"case": case, "ms": {results.OURS: {"median": ours}, "torch": {"median": theirs}}}
        for case, (ours, theirs) in cases.items()
    ]
    head, rule, *lines, _, means = results.table(rows).splitlines()
    assert head == "| case | ours, ms | torch, ms | torch / ours |"
    assert rule == "| --- | --- | --- | --- |"
    assert lines == [
        "| slow | 2 | 1 | 0.50 |",
        "| fast | 1 | 8 | 8.00 |",
        "| next | 0.5 | 1 | 2.00 |",
    ]
    assert means == "torch / ours: 2.00 in the geometric mean, at least 0.50, below 1 in 1 of 3."
