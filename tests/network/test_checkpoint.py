import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ece408_op.errors import CheckpointMismatch, CheckpointMissing, InvalidSetting
from ece408_op.files import resources
from ece408_op.network import checkpoint


def _assert_same(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(parameters[name], array.asnumpy(), name)
        assert parameters[name].dtype == array.dtype, name


def test_what_a_module_saves(mx, tmp_path):
    data = mx.sym.concat(mx.sym.var("left"), mx.sym.var("right"))
    made = mx.sym.BatchNorm(mx.sym.FullyConnected(data, num_hidden=3, name="fc"), name="bn")
    made = mx.sym.SoftmaxOutput(made, name="softmax")
    module = mx.mod.Module(made, data_names=("right", "left"))
    module.bind([("right", (2, 4)), ("left", (2, 5))], [("softmax_label", (2,))])
    module.init_params(mx.init.Uniform(1))
    module.save_checkpoint(str(tmp_path / "net"), 12)
    found = checkpoint.read(tmp_path / "net", 12)
    arguments, auxiliary = module.get_params()
    _assert_same(found.parameters, {**arguments, **auxiliary})
    # In the order in which the network reads them.
    assert (found.data, found.labels) == (("left", "right"), ("softmax_label",))
    nodes, expected = (json.loads(text)["nodes"] for text in (found.text, made.tojson()))
    assert [node["name"] for node in nodes] == [node["name"] for node in expected]


def test_what_gluon_exports(mx, tmp_path):
    nn = mx.gluon.nn
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.PReLU(), nn.Flatten(), nn.Dense(2))
    net.initialize(mx.init.Uniform(1))
    net.hybridize()
    net(mx.nd.ones((1, 3, 6, 6)))
    net.export(str(tmp_path / "net"), 3)
    found = checkpoint.read(str(tmp_path / "net"), 3)
    _assert_same(found.parameters, {n: each.data() for n, each in net.collect_params().items()})
    assert (found.data, found.labels) == (("data",), ())


def test_parameters_that_are_missing_or_too_many(mx, tmp_path):
    data, bias = mx.sym.var("data"), mx.sym.var("scale")
    made = mx.sym.broadcast_mul(mx.sym.FullyConnected(data, num_hidden=3, name="fc"), bias)
    prefix = tmp_path / "net"
    made.save(f"{prefix}-symbol.json")
    arrays = {"arg:fc_weight": mx.nd.ones((3, 2)), "arg:fc_bias": mx.nd.ones(3)}
    # Gluon's own files have no prefixes.
    mx.nd.save(f"{prefix}-0000.params", {**arrays, "other": mx.nd.ones(1), "scale": mx.nd.ones(1)})
    found = checkpoint.read(prefix, 0)
    assert list(found.parameters) == ["fc_weight", "fc_bias", "scale"]
    mx.nd.save(f"{prefix}-0001.params", arrays)
    assert checkpoint.read(prefix, 1).data == ("data", "scale")
    del arrays["arg:fc_bias"]
    mx.nd.save(f"{prefix}-0002.params", arrays)
    message = rf"^parameter fc_bias is missing in {prefix}-0002\.params; check the epoch"
    with pytest.raises(CheckpointMismatch, match=message):
        checkpoint.read(prefix, 2)


def test_files_that_are_not_there(tmp_path):
    (path,) = (resources.models_dir() / "2019fa").glob("baseline-*.params")
    epoch = int(path.stem[-4:])
    for name in (path.name, "baseline-symbol.json"):
        shutil.copy(path.with_name(name), tmp_path / name)
    assert checkpoint.read(tmp_path / "baseline", epoch).data == ("data",)
    missing = {
        ("baseline", 77): rf"baseline-0077\.params is not there; its folder has {path.name};",
        ("basline", epoch): r"basline-symbol\.json is not there; its folder has baseline-symbol",
        ("no/baseline", epoch): "baseline-symbol.json: its folder is not there",
    }
    for (name, number), message in missing.items():
        with pytest.raises(CheckpointMissing, match=message) as raised:
            checkpoint.read(tmp_path / name, number)
        assert str(raised.value).isprintable(), name
    (tmp_path / path.name).unlink()
    with pytest.raises(CheckpointMissing, match="its folder has none; check the folder, prefix"):
        checkpoint.read(tmp_path / "baseline", epoch)
    for epoch in (-1, True, "3", 1.0, None):
        with pytest.raises(InvalidSetting, match=r"^epoch=.*PREFIX-0007\.params as 7$"):
            checkpoint.read(tmp_path / "baseline", epoch)


def test_it_needs_no_mxnet():
    (path,) = (resources.models_dir() / "2019fa").glob("baseline-*.params")
    prefix, epoch = path.with_name("baseline"), int(path.stem[-4:])
    code = (
        "import sys; sys.modules['mxnet'] = None; from ece408_op.network import checkpoint; "
        f"print(*checkpoint.read({str(prefix)!r}, {epoch}).parameters)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split()[:2] == ["conv1_weight", "conv2_weight"], run.stderr
