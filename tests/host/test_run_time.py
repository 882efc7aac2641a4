import pytest

from ece408_op.host import run_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0:00.50"), (11.66, "0:11.66"), (83.0, "1:23.00"), (3725.9, "1:02:05")],
)
def test_elapsed_time_as_gnu_time_prints_it(seconds, text):
    assert run_time._clock(seconds) == text


def test_summary_of_this_process():
    first, second = run_time.summary().splitlines()
    assert first.endswith("maxresident)k")
    assert second.endswith("swaps")
