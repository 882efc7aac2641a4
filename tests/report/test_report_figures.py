"""A report's pictures: their content, on light and dark pages."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from places import ROOT
from played import played_ladder

from ece408_op.bench import results, shapes
from ece408_op.course.comparison import Run
from ece408_op.course.course_terms import TERMS
from ece408_op.profile.activities import Activity, Profile
from ece408_op.report import figures, ladder, overview, svg, timeline


def _texts(picture):
    return [each.text for each in ElementTree.fromstring(picture).iter() if each.text]


def _profile(*activities):
    return Profile(activities, (), 1.0, 0, {})


def _labels(picture):
    """Return texts with their bounding boxes: left, top, right, bottom, in the picture's units."""
    root = ElementTree.fromstring(picture)
    for each in root.iter("{http://www.w3.org/2000/svg}text"):
        style = each.get("style")
        size = float(re.search(r"([\d.]+)px", style)[1])
        width = 0.55 * size * len(each.text)
        anchor = re.search(r"text-anchor: (\w+)", style)
        shift = {"start": 0.0, "middle": width / 2, "end": width}[anchor[1] if anchor else "start"]
        moved = re.search(r"translate\(([\d.-]+)[ ,]+([\d.-]+)\)", each.get("transform", ""))
        x, y = map(float, moved.groups() if moved else (each.get("x"), each.get("y")))
        if "rotate(-90" not in each.get("transform", "").replace("rotate(-0", ""):
            yield each.text, (x - shift, y - 0.7 * size, x - shift + width, y)


def _overlaps(picture):
    labels = list(_labels(picture))
    assert len(labels) > 5
    return [
        (one, other)
        for index, (one, a) in enumerate(labels)
        for other, b in labels[index + 1 :]
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]


def _recorded_ladder():
    """Return all CUDA kernels' recorded times of a term, below an H200's ceilings."""
    document = results.load(ROOT / "docs" / "results" / "cuda_bench.json")
    layers = ladder.problems(TERMS["2019fa"], 10000)
    rows = {row["case"]: row["ms"] for row in document["rows"]}
    kernels = {n: rows[shapes.called(p)] for n, p in layers.items()}
    names = dict.fromkeys(
        name for of_layer in kernels.values() for name in of_layer if name[0].isdigit()
    )
    steps = tuple(
        ladder.Step(name, "an idea", "half" not in name, {
            layer: [of_layer[name]["min"], of_layer[name]["median"]]
            for layer, of_layer in kernels.items() if name in of_layer
        })
        for name in names
    )  # fmt: skip
    return ladder.Ladder(
        "a GPU", 10000, {n: str(p) for n, p in layers.items()}, steps, (),
        {"half precision on tensor cores": 8e5, "TF32 on tensor cores": 4e5, "float32": 6e4},
        {"copy": 4000.0}, {"conv1": 0.6, "conv2": 0.9},
    )  # fmt: skip


def test_dots_have_a_figure_for_each_kernel_and_layer():
    texts = _texts(figures.ladder_dots(played_ladder("gpu")))
    assert {"1_naive", "10_tf32", "13_column_pairs", "cuDNN NCHW"} <= set(texts)
    assert [texts.count(each) for each in ("8.00", "2.00", "5.00")] == [2, 1, 1]
    # Only the library's time of each layer is of a single run.
    assert texts.count("1 run") == 2


def test_the_cpus_dots_say_where_winograd_computes():
    assert _texts(figures.ladder_dots(played_ladder("cpu"))).count("winograd") == 1


def test_the_roofline_names_its_ceilings_and_all_kernels():
    texts = _texts(figures.roofline(played_ladder("gpu")))
    assert {"copy, 400 GB/s", "TF32", "7,000 GFLOP/s", "float32", "900 GFLOP/s"} <= set(texts)
    assert {"13_column_pairs", "1_naive", "10_tf32", "conv1", "conv2"} <= set(texts)


@pytest.mark.parametrize("draw", [figures.ladder_dots, figures.roofline])
def test_labels_do_not_cover_each_other(draw):
    close = replace(played_ladder("cpu"), gflops={"avx512": 110.0, "avx2": 100.0})
    for measured in (_recorded_ladder(), close):
        assert not _overlaps(draw(measured))


def test_the_overview_has_a_panel_for_each_layer_and_a_row_for_each_contender():
    runs = [Run("m2.1", "2019fa", "ece408", 2000, 0.9, (s, 0.6), 1.0, 1) for s in (0.3, 0.4, 0.5)]
    mxnet = [Run("m1.1", "2019fa", "baseline", 2000, 0.9, (1.0, 2.0), 1.0, 1)]
    batches = {"gpu": 100, "cpu": 500}
    ladders = {d.upper(): replace(played_ladder(d), batch=n) for d, n in batches.items()}
    found = overview.groups({"m1.1": mxnet, "m2.1": runs, "m1.2": []}, ladders)
    picture = overview.draw(found, {"conv1": "first", "conv2": "second"})
    texts = _texts(picture)
    rows = ["within the network", "MXNet, CPU (m1.1)", "ours, CPU (m2.1)", "called alone",
            "MXNet, CPU", "ours, CPU", "cuDNN, GPU", "ours, GPU"]  # fmt: skip
    assert [text for text in texts if text in rows] == 2 * rows
    assert {"conv1: first", "conv2: second", "µs for each image, logarithmic"} <= set(texts)
    figures_of = [
        *("500", "200", "8.00", "6.00", "40.0", "20.0"),
        *("1000", "300", "10.0", "6.00", "50.0", "80.0"),
    ]
    assert [text for text in texts if text in figures_of] == figures_of
    assert texts.count("1 run") == 6
    assert not _overlaps(picture)
    assert overview.draw([], {"conv1": "first"}) is None


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_and_told_apart_on_light_pages_and_dark():
    used = (svg.INK, svg.BLUE, svg.ORANGE, svg.GREEN, svg.SLATE, svg.RED, svg.PINK)
    for paper, colours in ((svg.PAPER, used), (svg.DARK[svg.PAPER], [svg.DARK[c] for c in used])):
        assert min(_contrast(colour, paper) for colour in colours) >= 4.5
    for series in (svg.SERIES, [svg.DARK[colour] for colour in svg.SERIES]):
        pairs = itertools.combinations(
            [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in series], 2
        )
        assert min(math.dist(one, other) for one, other in pairs) > 80


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
    # It ended before the GPU received work.
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
    picture = figures.ladder_dots(played_ladder("cpu"))
    assert "@media (prefers-color-scheme:dark)" in picture
    assert f'[style*="fill: {svg.INK}"]' in picture
    # All replaced colours occur, and nothing is black or has a white background.
    assert f"fill: {svg.INK}" in picture.partition("</style>")[2]
    assert "#000000" not in picture
    assert f"fill: {svg.PAPER}" not in picture.partition("</style>")[2]
    assert figures.ladder_dots(played_ladder("cpu")) == picture


def test_effects_are_over_the_accurate_step_before():
    assert played_ladder("gpu").effects("conv1") == {
        "10_tf32": (8.0, "1_naive"),
        "13_column_pairs": (4.0, "1_naive"),
    }
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
    assert [shapes.called(each) for each in found.values()] == names
    assert all(each.batch == 7 for each in found.values())
