"""Comparison of two networks: the difference of their outputs, and their times."""

import copy

import numpy as np
import pytest

import ece408_op
from ece408_op.cli import main, swap
from ece408_op.errors import InvalidSetting, WrongResult
from ece408_op.operator.net_comparison import NetComparison


@pytest.fixture
def net(mx):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Conv2D(6, 3, in_channels=2), mx.gluon.nn.Dense(4, in_units=6 * 5 * 5))
    net.initialize(mx.init.Xavier())
    return net


def test_a_swapped_net_is_as_exact(mx, net):
    swapped = copy.deepcopy(net)
    ece408_op.swap(swapped)
    found = ece408_op.compare(net, swapped, mx.nd.random.uniform(shape=(3, 2, 7, 7)))
    assert found.error < 1e-5
    assert min(found.seconds) > 0
    assert str(found).startswith("outputs differ by at most ")


def test_the_largest_difference_counts(mx):
    x = mx.nd.array([[1, -8], [2, 4]])
    outputs = [x, [x * 2, x]]
    others = [x, [x * 2 + mx.nd.array([[0, 0], [1, 0]]), x]]
    assert ece408_op.compare(lambda a: outputs, lambda a: others, x, rounds=1).error == 1 / 16


def test_nan_is_equal_to_nan_only(mx):
    x = mx.nd.array([np.nan, np.inf, 1])
    assert ece408_op.compare(lambda a: a, lambda a: a + 0, x, rounds=1).error == 0
    assert not ece408_op.compare(lambda a: a, lambda a: mx.nd.ones(3), x, rounds=1).error <= 1


def test_infinities_do_not_hide_differences(mx):
    x = mx.nd.array([np.inf, np.nan, 4, 1])
    changed = mx.nd.array([np.inf, np.nan, 4, 2])
    assert ece408_op.compare(lambda a: a, lambda a: changed, x, rounds=1).error == 1 / 4
    lost = mx.nd.array([1, np.nan, 4, 1])
    assert ece408_op.compare(lambda a: a, lambda a: lost, x, rounds=1).error == np.inf


def test_other_shapes_are_refused(mx):
    x = mx.nd.ones((2, 3))
    with pytest.raises(InvalidSetting, match=r"shapes \[\(2, 3\)\] and \[\(3, 2\)\]"):
        ece408_op.compare(lambda a: a, lambda a: a.T, x)


@pytest.fixture
def stored(net, mx, tmp_path):
    """Return the prefix of a checkpoint of epoch 0, whose images are 2x7x7."""
    net.hybridize()
    net(mx.nd.ones((1, 2, 7, 7)))
    net.export(str(tmp_path / "net"))
    return tmp_path / "net"


def test_the_command_verifies(stored, run_ece408, tmp_path):
    command = ("swap", str(stored), "0", str(tmp_path / "ours"), "--verify", "--image", "2x7x7")
    result = run_ece408(*command, "--batch-size", "3")
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("before and after: outputs differ by at most ")
    assert second.startswith("swapped 1: ")
    assert (tmp_path / "ours-symbol.json").is_file()


def test_what_differs_is_not_written(stored, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(swap, "compare_symbols", lambda *_: NetComparison(2e-4, (1.0, 1.0)))
    command = ["swap", str(stored), "0", str(tmp_path / "ours"), "--verify", "--image", "2x7x7"]
    assert main.execute(command) == WrongResult.exit_code
    assert "the swapped network differs by 2.0e-04; " in capsys.readouterr().err
    assert not list(tmp_path.glob("ours*"))
    assert main.execute([*command, "--precision", "tf32"]) == 0


def test_given_images_are_what_networks_are_compared_on(stored, tmp_path, noted, capsys):
    images = np.random.default_rng(5).random((3, 2, 7, 7))
    np.save(tmp_path / "images.npy", images)
    taken = noted(swap, "compare_symbols")
    command = ["swap", str(stored), "0", str(tmp_path / "ours"), "--verify", "--input"]
    assert main.execute([*command, str(tmp_path / "images.npy")]) == 0
    assert (taken[0][-1] == images.astype(np.float32)).all()
    capsys.readouterr()
    for content, reason in ((b"", "is not a .npy file with images"), (b"text", "numpy.save")):
        (tmp_path / "wrong.npy").write_bytes(content)
        assert main.execute([*command, str(tmp_path / "wrong.npy")]) == InvalidSetting.exit_code
        assert reason in capsys.readouterr().err
    np.save(tmp_path / "other.npy", images[:, :1])
    assert main.execute([*command, str(tmp_path / "other.npy")]) == InvalidSetting.exit_code
    assert "the network does not accept images of 1x7x7" in capsys.readouterr().err
