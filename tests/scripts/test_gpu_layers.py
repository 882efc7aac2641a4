"""What bench_layers.py makes of times on a GPU: a network's sum counts each of its convolutions."""

from __future__ import annotations

from collections import Counter

from studies import gpu_layers

STEM, BLOCK = "c3,h224,w224,m64,k7x7,s2x2,p3x3", "c64,h56,w56,m64,k3x3,p1x1"


def _measured(layer, batch, ours, cudnn, direction="forward"):
    ms = {"implicit_gemm_prepacked": {"median": ours}}
    ms |= {f"cudnn {layout}": {"median": each} for layout, each in zip(("NCHW", "NHWC"), cudnn)}
    return {"layer": layer, "batch": batch, direction: {"chosen": next(iter(ms)), "ms": ms}}


def test_sums_count_every_convolution_and_take_cudnns_better_layout():
    networks = {"a": Counter({STEM: 1, BLOCK: 4}), "b": Counter({BLOCK: 2, "c9,h9,w9,m9,k1x1": 1})}
    found = [_measured(STEM, 32, 1.0, (3.0, 2.0)), _measured(BLOCK, 32, 0.5, (0.25, 0.75))]
    title, table = gpu_layers.sums(found, networks)
    assert title == "## Sums of networks"
    # Of b a layer is missing, of other directions and batches all are.
    assert table.splitlines()[2:] == ["| a | 32 | forward | 3.000 | 3.000 | 1.00 |"]
    assert gpu_layers.sums(found[:1], networks) == []


def test_without_cudnn_there_is_no_factor():
    (_, table) = gpu_layers.sums([_measured(STEM, 1, 1.0, ())], {"a": Counter({STEM: 2})})
    assert table.splitlines()[2] == "| a | 1 | forward | 2.000 | nan |  |"
    (row,) = [
        line
        for line in gpu_layers.tables([_measured(STEM, 1, 1.0, ())]).splitlines()
        if STEM in line
    ]
    assert row.endswith("|  |  |")


def test_a_networks_layers_are_counted(mx):
    counts = gpu_layers.layers_of("resnet18_v1")
    assert counts[STEM] == 1
    assert counts[BLOCK] == 4
    assert (len(counts), sum(counts.values())) == (11, 20)
