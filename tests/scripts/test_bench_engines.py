"""scripts/bench_engines.py, with an engine that is ONNX's own evaluator."""

from __future__ import annotations

import sys

import pytest
from studies import engines, zoo

from ece408_op.bench.cpu_timer import WARM_UP
from ece408_op.errors import InvalidSetting

ENGINE = """
from types import SimpleNamespace
from onnx.reference import ReferenceEvaluator

__version__ = "played"
SessionOptions = SimpleNamespace

class InferenceSession:
    def __init__(self, path, options, providers):
        assert options.intra_op_num_threads > 0
        self._evaluator = ReferenceEvaluator(path)
    def get_inputs(self):
        return [SimpleNamespace(name=self._evaluator.input_names[0])]
    def run(self, names, inputs):
        return self._evaluator.run(names, inputs)
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (tmp_path / "onnxruntime.py").write_text(ENGINE)
    (tmp_path / "openvino.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with engines.Engines(sys.executable) as peer:
        yield peer


def _small(mx):
    def build(name, batch):
        net = mx.gluon.nn.HybridSequential(prefix=f"{name}_")
        with net.name_scope():
            net.add(mx.gluon.nn.Conv2D(4, 3, activation="relu"), mx.gluon.nn.Dense(3))
        net.initialize()
        x = mx.nd.random.uniform(shape=(batch, 3, 9, 8))
        net(x).wait_to_read()
        return net, x

    return build


def test_a_network_computes_the_same_in_an_engine(mx, engine, monkeypatch):
    monkeypatch.setattr(zoo, "build", _small(mx))
    assert engine.versions == {"onnxruntime": "played"}
    turns = []
    found = engines.measure("small", 2, engine, 3, lambda: turns.append(1))
    assert len(turns) == 3 + WARM_UP
    assert 0 <= found.error < 1e-5
    assert {who: len(samples) for who, samples in found.ms.items()} == {"ours": 3, "onnxruntime": 3}
    head, _, row = engines.table([found]).splitlines()
    assert head.startswith("| network | batch | onnxruntime, ms | ours, ms |")
    assert row.startswith("| small | 2 | ")
    assert engines.records([found])[0]["ms"]["ours"]["n"] == 3


def test_a_python_without_engines_is_said_in_one_line(tmp_path, monkeypatch):
    for name in ("onnxruntime", "openvino", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InvalidSetting, match="has none of the engines"):
        engines.Engines(sys.executable)
