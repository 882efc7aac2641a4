"""Times of the CUDA kernels in a report, on a fake GPU, and once on a real one."""

import contextlib
from types import SimpleNamespace

import pytest

from ece408_op.course.course_terms import TERMS
from ece408_op.errors import KernelCompileFailed
from ece408_op.profile.gpu_ceilings import GpuCeilings
from ece408_op.report import gpu_ladder, ladder
from ece408_op.report.gpu_ladder import what_changed

LAYERS = ladder.problems(TERMS["2019fa"], 4)


class PlayedBench:
    """Times kernels by their number, in ms; two of them fail."""

    def __init__(self, gpu, problem):
        self.gpu, self.problem = gpu, problem

    def time(self, kernel, samples):
        if kernel.name == "2_constant_weights":
            raise KernelCompileFailed("line 3: error")
        failure = "7 elements are not finite" if kernel.name == "3_shared_tiles" else None
        return SimpleNamespace(samples_ms=[float(kernel.name[0])] * samples, failure=failure)


class PlayedPeer:
    def __init__(self):
        self.versions = {"torch": "2", "cudnn": 9}

    def measure(self, problem, samples):
        return {"NCHW float32": {"samples_ms": [3.0]}, "NHWC tf32": {"failure": "no algorithm"}}


@pytest.fixture
def h200(monkeypatch):
    def bench(gpu, problem):
        return contextlib.nullcontext(PlayedBench(gpu, problem))

    gpu = SimpleNamespace(capability=(9, 0))
    driver = SimpleNamespace(gpus=(SimpleNamespace(name="A played GPU"),))
    monkeypatch.setattr(gpu_ladder.device, "get", lambda index: gpu)
    monkeypatch.setattr(gpu_ladder, "find_driver", lambda: driver)
    monkeypatch.setattr(gpu_ladder.cuda_timer, "bench", bench)
    monkeypatch.setattr(gpu_ladder.cudnn, "Peer", lambda _: contextlib.nullcontext(PlayedPeer()))
    monkeypatch.setattr(
        gpu_ladder.gpu_ceilings, "measure", lambda gpu: GpuCeilings(4000.0, 60000.0, 0.0)
    )


def test_what_has_no_time_is_noted(h200):
    found = gpu_ladder.measure(LAYERS, "python3")
    names = [step.name for step in found.steps]
    assert {"1_naive", "10_tf32", "17_half_wgmma"} <= set(names)
    assert not {"2_constant_weights", "3_shared_tiles"} & set(names)
    for note in (
        "2_constant_weights has no time on conv1: line 3: error.",
        "3_shared_tiles has no time on conv2: 7 elements are not finite.",
        "cuDNN NHWC tf32 has no time on conv2: no algorithm.",
        "cuDNN through PyTorch, in a separate process (torch 2, cudnn 9).",
    ):
        assert note in found.notes
    assert any(note.startswith("12_one_channel has no time on conv2: ") for note in found.notes)
    assert found.steps[names.index("12_one_channel")].median_ms("conv2") is None


def test_steps_and_floors(h200):
    found = gpu_ladder.measure(LAYERS, None)
    assert found.peers == ()
    assert found.gflops == {"float32": 60000.0}  # and no rate of missing tensor cores
    floors = {name: max(p.flops / 60000, p.bytes / 4000) / 1e6 for name, p in LAYERS.items()}
    assert found.floors_ms == pytest.approx(floors)
    exact = {step.name: step.accurate for step in found.steps}
    assert (exact["1_naive"], exact["9_half"], exact["10_tf32"]) == (True, False, False)
    assert "Changed against 5_implicit_gemm.cu" in next(
        step.why for step in found.steps if step.name == "6_register_tiles"
    )


def test_what_a_kernel_changes_is_in_its_header():
    header = (
        "// 3. Tiles.\n//\n// Changed against 2: tiles\n// and halos.\n//\n// Measured: 1 ms.\n"
    )
    changed = what_changed(f'{header}#include "x"\n// not this')
    assert changed == "Changed against 2: tiles and halos."


@pytest.mark.gpu
def test_every_kernel_has_a_time_where_it_can_compute():
    found = gpu_ladder.measure(LAYERS, None)
    gpu = gpu_ladder.device.get(0)
    for layer, problem in LAYERS.items():
        able = {k.name for k in gpu_ladder.LADDER if k.why_not(problem, gpu.capability) is None}
        assert {step.name for step in found.steps if step.median_ms(layer)} == able
