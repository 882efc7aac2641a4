"""Networks under `gpu()` if MXNet has no code for the GPU, which is simulated."""

import pytest

import ece408_op
from ece408_op.errors import NoUsableGpu
from ece408_op.files import resources
from ece408_op.operator import gpu_support

REFUSAL = r"no network can run under mx\.gpu\(\) here: it is too new; keep .* backend='cuda'"
PREFIX = resources.models_dir() / "2019fa" / "baseline"


@pytest.fixture
def _unfit(monkeypatch):
    monkeypatch.setattr(gpu_support, "reason_against", lambda: "it is too new")


@pytest.mark.usefixtures("_unfit")
def test_checkpoints_and_symbols_are_refused_in_that_context(mx, tmp_path):
    symbol, _, _ = ece408_op.load_checkpoint(PREFIX, 6)
    with mx.gpu():
        for call in (
            lambda: ece408_op.load_checkpoint(PREFIX, 6),
            lambda: ece408_op.swap(symbol),
            lambda: ece408_op.swap_checkpoint(PREFIX, 6, tmp_path / "out"),
        ):
            with pytest.raises(NoUsableGpu, match=REFUSAL):
                call()


@pytest.mark.usefixtures("_unfit")
def test_nets_that_are_to_be_there_are_refused(mx):
    net = mx.gluon.nn.Conv2D(4, 3, use_bias=False)
    ece408_op.swap(net)  # not on any device yet
    net.initialize(ctx=[mx.cpu(), mx.gpu()])
    with pytest.raises(NoUsableGpu, match=REFUSAL):
        ece408_op.swap(net)


def test_nothing_is_refused_where_mxnet_has_code(mx, monkeypatch):
    monkeypatch.setattr(gpu_support, "reason_against", lambda: None)
    with mx.gpu():
        assert "ece408_conv" in ece408_op.swap(_symbol(mx)).tojson()


def test_the_cpu_is_never_refused(mx, monkeypatch):
    monkeypatch.setattr(gpu_support, "reason_against", lambda: pytest.fail("asked"))
    ece408_op.swap(_symbol(mx))


def _symbol(mx):
    return mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c")
