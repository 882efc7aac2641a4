"""Requests that cannot be met: a backend or a CUDA kernel."""

import contextlib
from unittest.mock import Mock

import pytest

import ece408_op
from ece408_op import errors, settings
from ece408_op.backends.cuda.runtime import device
from ece408_op.errors import InvalidSetting, NoUsableGpu
from ece408_op.host import gpu

LAYER = {"kernel": (3, 3), "num_filter": 4, "no_bias": True}
WRONG = [
    ({"cuda_kernel": "21_fastest"}, "unknown CUDA kernel '21_fastest'; there are: 1_naive, "),
    ({"cuda_kernel": "general_backward_data"}, "is for gradients; choose one of 1_naive, "),
    ({"backend": "quantum"}, "unknown backend 'quantum'; choose one of cpu, "),
]


@pytest.fixture
def arrays(mx):
    return mx.nd.ones((1, 3, 8, 8)), mx.nd.ones((4, 3, 3, 3))


@pytest.fixture
def no_gpu(monkeypatch):
    nowhere = Mock(side_effect=NoUsableGpu("no GPU, says the test"))
    monkeypatch.setattr(gpu, "find_driver", nowhere)
    monkeypatch.setattr(device, "get", nowhere)


@pytest.mark.parametrize(("asked", "text"), WRONG)
def test_an_unknown_name_is_refused_where_it_is_given(mx, arrays, asked, text):
    with pytest.raises(InvalidSetting, match=text):
        ece408_op.Convolution(*arrays, **LAYER, **asked)
    with mx.autograd.record(), pytest.raises(InvalidSetting, match=text):
        ece408_op.Convolution(*arrays, **LAYER, **asked)
    with pytest.raises(InvalidSetting, match=text):
        ece408_op.Convolution(mx.sym.Variable("x"), **LAYER, **asked)
    if "backend" in asked:
        with pytest.raises(InvalidSetting, match=text):
            ece408_op.Conv2D(4, 3, **asked)


@pytest.mark.parametrize(("asked", "text"), WRONG)
def test_an_unknown_name_in_the_settings_is_refused_too(mx, arrays, monkeypatch, asked, text):
    symbol = ece408_op.Convolution(mx.sym.Variable("x"), mx.sym.Variable("w"), **LAYER)
    ((name, value),) = asked.items()
    monkeypatch.setenv({"cuda_kernel": "ECE408_KERNEL", "backend": "ECE408_BACKEND"}[name], value)
    with pytest.raises(InvalidSetting, match=text):
        ece408_op.Convolution(*arrays, **LAYER)
    with pytest.raises(InvalidSetting, match=text):
        ece408_op.Conv2D(4, 3)
    with pytest.raises(InvalidSetting, match=text), errors.surfaced():
        symbol.simple_bind(mx.cpu(), x=(1, 3, 8, 8), w=(4, 3, 3, 3))


@pytest.mark.parametrize(("asked", "text"), WRONG)
def test_an_unknown_name_in_a_file_is_refused_when_it_is_bound(mx, asked, text):
    symbol = ece408_op.Convolution(mx.sym.Variable("x"), **LAYER)
    ((name, value),) = asked.items()
    whole = symbol.tojson().replace('"no_bias": "True"', f'"no_bias": "True", "{name}": "{value}"')
    for grad_req in ("null", "write"):
        with pytest.raises(InvalidSetting, match=text), errors.surfaced():
            mx.sym.load_json(whole).simple_bind(mx.cpu(), grad_req=grad_req, x=(1, 3, 8, 8))


@pytest.mark.parametrize("by", ["argument", "setting"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_call_raises_why_its_backend_cannot_compute(mx, arrays, no_gpu, by, recorded):
    own = {"backend": "cuda"} if by == "argument" else {}
    common = {} if own else {"backend": "cuda"}
    scope = mx.autograd.record() if recorded else contextlib.nullcontext()
    with settings.override(**common), scope, pytest.raises(NoUsableGpu, match="says the test"):
        ece408_op.Convolution(*arrays, **LAYER, **own)


def _symbol(mx):
    x, w = mx.sym.Variable("x"), mx.sym.Variable("w")
    return ece408_op.Convolution(x, w, **LAYER, backend="cuda")


def _executor(mx, x, w):
    return _symbol(mx).bind(mx.cpu(), {"x": x, "w": w}).forward()[0]


def _training(mx, x, w):
    args = {"x": x, "w": w}
    gradients = {name: array.zeros_like() for name, array in args.items()}
    return _symbol(mx).bind(mx.cpu(), args, gradients).forward(is_train=True)[0]


def _hybridized(mx, x, w):
    net = ece408_op.Conv2D(4, 3, in_channels=3, backend="cuda")
    net.initialize()
    net.hybridize()
    return net(x)


@pytest.mark.parametrize("run", [_executor, _training, _hybridized])
def test_where_mxnet_runs_it_the_reason_is_on_stderr(mx, arrays, no_gpu, capfd, monkeypatch, run):
    monkeypatch.setattr(errors, "_last_said", "")
    with pytest.raises(mx.MXNetError):
        run(mx, *arrays).asnumpy()
    lines = capfd.readouterr().err.splitlines()
    assert lines.count("ece408: error: no GPU, says the test") == 1
    with pytest.raises(NoUsableGpu, match="says the test"), errors.surfaced():
        run(mx, *arrays).asnumpy()
    assert "ece408: error" not in capfd.readouterr().err
