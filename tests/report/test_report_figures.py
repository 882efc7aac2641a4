"""The pictures of a report: what they show, and that they suit light pages and dark ones."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from played import played_ladder

from ece408_op.course.models import TERMS
from ece408_op.profile.activities import Activity, Profile
from ece408_op.report import figures, ladder, svg, timeline


def _texts(picture):
    return [each.text for each in ElementTree.fromstring(picture).iter() if each.text]


def _profile(*activities):
    return Profile(activities, (), 1.0, 0, {})


def test_bars_have_a_figure_for_each_kernel_and_layer():
    texts = _texts(figures.ladder_bars(played_ladder("gpu")))
    assert {"1_naive", "10_tf32", "13_column_pairs", "a peer"} <= set(texts)
    assert (texts.count("8"), texts.count("2"), texts.count("5")) == (2, 1, 1)


def test_the_roofline_names_its_ceilings_and_the_fastest_kernels():
    texts = _texts(figures.roofline(played_ladder("gpu")))
    assert {"copy, 400 GB/s", "TF32, 7000 GFLOP/s", "float32, 900 GFLOP/s"} <= set(texts)
    assert {"13_column_pairs", "1_naive", "conv1", "conv2"} <= set(texts)


def test_close_ceilings_share_a_label():
    close = replace(played_ladder("cpu"), gflops={"avx512": 110.0, "avx2": 100.0})
    assert "avx512, 110; avx2, 100 GFLOP/s" in _texts(figures.roofline(close))


def test_the_time_line_has_a_row_for_each_stream_and_thread():
    profile = _profile(
        Activity("api", "cuInit", 0, 5, "thread 1", {}),
        Activity("memcpy", "[CUDA memcpy HtoD]", 100, 900, "GPU 0 stream 17", {}),
        Activity("kernel", "convolve", 1000, 9000, "GPU 0 stream 7", {}),
        Activity("api", "cuStreamSynchronize", 900, 9000, "thread 2", {}),
    )
    texts = _texts(timeline.draw(profile))
    rows = ["GPU 0 stream 7", "GPU 0 stream 17", "CUDA API calls, thread 2"]
    assert [text for text in texts if text in rows] == rows
    assert {"convolve", "kernel", "copy", "CUDA API call"} <= set(texts)
    # It ended before the GPU had anything to do.
    assert "CUDA API calls, thread 1" not in texts


def test_of_many_rows_the_first_are_drawn_and_that_is_said():
    calls = [Activity("api", "cuInit", 0, 9, f"thread {n}", {}) for n in range(40)]
    texts = _texts(timeline.draw(_profile(Activity("kernel", "k", 0, 9, "stream", {}), *calls)))
    assert any("the first 32 rows of 41" in text for text in texts)
    assert {"stream", "CUDA API calls, thread 30"} <= set(texts)
    assert "CUDA API calls, thread 31" not in texts


def test_without_activities_there_is_no_time_line():
    assert timeline.draw(_profile()) is None


@pytest.mark.parametrize(
    ("spans", "bars"),
    [
        ([("a", 0, 100), ("b", 100, 200)], [(0, 100, "a"), (100, 200, "b")]),
        ([("a", 0, 100), ("a", 103, 105)], [(0, 105, "a")]),
        ([("a", 0, 2), ("b", 3, 5), ("c", 6, 7)], [(0, 7, None)]),
        ([("a", 0, 2), ("a", 50, 52)], [(0, 2, "a"), (50, 52, "a")]),
        ([("a", 0, 100), ("b", 40, 60)], [(0, 100, None)]),
        ([("a", 0, 100), ("b", 101, 103)], [(0, 103, "a")]),
        ([("a", 900, 2000)], [(900, 1000, "a")]),
    ],
)
def test_what_is_too_short_to_be_seen_is_drawn_together(spans, bars):
    activities = [Activity("kernel", name, a, b - a, "s", {}) for name, a, b in spans]
    assert timeline.merged(activities, 0, 1000, gap=5) == bars


def test_pictures_turn_dark_by_themselves():
    picture = figures.ladder_bars(played_ladder("cpu"))
    assert "@media (prefers-color-scheme:dark)" in picture
    assert f'[style*="fill: {svg.INK}"]' in picture
    # What the rules replace is there, and nothing is black or has a white ground.
    assert f"fill: {svg.INK}" in picture.partition("</style>")[2]
    assert "#000000" not in picture
    assert "#ffffff" not in picture
    assert figures.ladder_bars(played_ladder("cpu")) == picture


def test_effects_are_over_the_accurate_step_before():
    assert played_ladder("gpu").effects("conv1") == {"10_tf32": 8.0, "13_column_pairs": 4.0}
    assert played_ladder("gpu").fastest("conv2").name == "1_naive"


def test_a_ladder_survives_its_json():
    assert ladder.from_json(ladder.to_json(played_ladder("cpu"))) == played_ladder("cpu")


@pytest.mark.parametrize(
    ("term", "names"),
    [("2017fa", ["fa17_1"]), ("2018sp", ["sp18_1", "sp18_2"]), ("2019sp", ["sp19_1", "sp19_2"]),
     ("2019fa", ["fa19_1", "fa19_2"])],
)  # fmt: skip
def test_a_terms_layers_are_those_of_the_benchmarks(term, names):
    found = ladder.problems(TERMS[term], 7)
    assert [ladder.shape_name(each) for each in found.values()] == names
    assert all(each.batch == 7 for each in found.values())
