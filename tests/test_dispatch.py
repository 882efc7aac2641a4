"""The choice of a backend by the arrays' device, and the settings of the CUDA backend."""

import sys

import pytest

import ece408_op
from ece408_op import dispatch, settings
from ece408_op.backends import as_array
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.backends.cuda.cuda_backend import StagedBackend, ZeroCopyBackend
from ece408_op.backends.cuda.runtime import device
from ece408_op.dispatch import Layer
from ece408_op.errors import InvalidSetting, NoUsableGpu, UnsupportedProblem
from ece408_op.host.gpu import find_driver
from ece408_op.problem import ConvProblem

PROBLEM = ConvProblem.parse("b2,c1,h9,w9,m4,k3")


def test_each_device_has_its_own_way_in():
    assert dispatch.select(PROBLEM, Layer(), "forward").name == "cpu"
    staged = dispatch.select(PROBLEM, Layer(backend="cuda"), "forward")
    assert isinstance(staged, StagedBackend)
    for direction in ("forward", "backward_data", "backward_weight"):
        in_place = dispatch.select(PROBLEM, Layer(device="gpu", index=1), direction)
        assert isinstance(in_place, ZeroCopyBackend)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_arrays_on_a_gpu_are_not_given_to_the_cpu(name):
    layer = Layer(device="gpu", index=1, backend=name)
    with pytest.raises(UnsupportedProblem, match=rf"backend {name} does not reach .* gpu\(1\)"):
        dispatch.select(PROBLEM, layer, "forward")


def test_no_gpu_is_looked_for_before_there_is_something_to_compute(run_python):
    code = (
        "import sys; from ece408_op import dispatch; from ece408_op.problem import ConvProblem\n"
        "layer = dispatch.Layer(backend='cuda')\n"
        "dispatch.select(ConvProblem.parse('b2,c1,h9,w9,m4,k3'), layer, 'forward')\n"
        "assert not any(name.split('.')[0] == 'pycuda' for name in sys.modules)\n"
    )
    assert run_python(code).returncode == 0


def test_without_pycuda(monkeypatch):
    monkeypatch.setattr(device, "_gpus", {})
    monkeypatch.setattr(device, "find_driver", lambda: None)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(NoUsableGpu, match="PyCUDA is not installed; `ece408 gpu-setup`"):
        device.get(0)


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(device, "_gpus", {})
    monkeypatch.setattr(device, "find_driver", lambda: find_driver("libcuda-that-is-not-there.so"))
    with pytest.raises(NoUsableGpu, match="no NVIDIA driver"):
        StagedBackend().prepare(PROBLEM, "forward")


def test_amounts_of_memory_and_lists_of_gpus(monkeypatch):
    for text, nbytes in (
        *(("1", 1), ("64M", 64 << 20), ("2G", 2 << 30), ("512MiB", 512 << 20), ("3kb", 3 << 10)),
    ):
        monkeypatch.setenv("ECE408_GPU_MEMORY", text)
        assert settings.gpu_memory() == nbytes
    assert settings.devices() == (0,)
    monkeypatch.setenv("ECE408_DEVICES", "2, 0")
    assert settings.devices() == (2, 0)


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("GPU_MEMORY", "0 -1 64X half 1.5G 50%", r"not an amount of memory \(ECE408_GPU_MEMORY\)"),
        ("DEVICES", ", 0, a -1 0,0 1,01", r"is not a list of GPUs \(--gpu, ECE408_DEVICES\)"),
        ("KERNEL", "0_magic general_backward_data", "{text}.*choose one of|unknown.*{text}"),
    ],
)
def test_settings_that_mean_nothing(monkeypatch, name, texts, message):
    for text in texts.split():
        monkeypatch.setenv(f"ECE408_{name}", text)
        with pytest.raises(InvalidSetting, match=message.replace("{text}", text)):
            dispatch.check_settings()


class Doubled(ReferenceBackend):
    """A backend with doubled results, which reveal that it computed."""

    name = "doubled"

    def supports(self, problem, direction):
        return None if direction == "forward" else "it is a forward backend"

    def forward(self, problem, x, w, bias, y, accumulate):
        done = super().forward(problem, x, w, bias, y, accumulate)
        as_array(y, problem.y_shape, problem.dtype)[...] *= 2
        return done


@pytest.fixture
def doubled(monkeypatch):
    monkeypatch.setitem(dispatch._BACKENDS, "cpu", dict(dispatch._BACKENDS["cpu"]))
    ece408_op.register_backend("doubled", Doubled())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_registered_backend_computes(mx, doubled, dtype):
    x, w = mx.nd.ones((2, 3, 6, 6), dtype=dtype), mx.nd.ones((4, 3, 3, 3), dtype=dtype)
    with ece408_op.op_times() as log:
        y = ece408_op.Convolution(
            x, w, None, kernel=(3, 3), num_filter=4, no_bias=True, backend="doubled"
        )
        assert (y.asnumpy() == 54).all()
    assert [entry.backend for entry in log] == ["doubled"]


def test_a_registered_backend_computes_in_hybridized_nets(mx, doubled, monkeypatch):
    net = ece408_op.Conv2D(4, 3, in_channels=3, weight_initializer="ones", use_bias=False)
    net.initialize()
    net.hybridize()
    monkeypatch.setenv("ECE408_BACKEND", "doubled")
    x = mx.nd.ones((2, 3, 6, 6))
    x.attach_grad()
    assert (net(x).asnumpy() == 54).all()
    # The package computes gradients, which it lacks.
    with mx.autograd.record():
        y = net(x)
    y.backward()
    assert x.grad.asnumpy().max() == 36


@pytest.mark.parametrize("name", ["cpu", "emulator", "", "1st", "a b"])
def test_what_is_no_backends_name(name):
    with pytest.raises(InvalidSetting, match="cannot be a backend's name"):
        ece408_op.register_backend(name, Doubled())


def test_what_is_no_backend(doubled):
    with pytest.raises(InvalidSetting, match="backend mine is a object; give an object of a class"):
        ece408_op.register_backend("mine", object())
    with pytest.raises(
        InvalidSetting, match=r"choose one of cpu, reference, cuda, emulator, .*doub"
    ):
        dispatch.check_name("mine")
