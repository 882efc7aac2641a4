"""The compiled operator on a GPU, with a fake driver that records its calls."""

import contextlib
import ctypes
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from fake_gpu import FakeGpu
from library_node import LibraryNode
from programs import together

import ece408_op
from ece408_op import dispatch, errors, settings
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.runtime import device, driver, native_plans
from ece408_op.backends.cuda.runtime.launcher import grid_of
from ece408_op.operator import compiled_operator, gpu_support
from ece408_op.operator.graphs import graph_json
from ece408_op.problem import ConvProblem

SOURCE = Path(__file__).parents[1] / "helpers" / "fake_libcuda.c"
X, W, BIAS, Y = 0x1100, 0x2200, 0x3300, 0x4400
STREAM, WORKSPACE = 0x77, 0x5000
LAYER = {"kernel": (5, 5), "num_filter": 24, "no_bias": True}
PROBLEM = ConvProblem.parse("b10,c12,h33,w33,m24,k5")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    found = ctypes.CDLL(str(path))
    found.fake_notes.restype = ctypes.c_char_p
    return found


@pytest.fixture
def cuda(mx, library, monkeypatch):
    """Set up the fake driver, and a fake GPU whose code is compiled immediately."""
    assert compiled_operator.missing() is None
    gpu = FakeGpu()
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(device, "get", lambda index: gpu)
    monkeypatch.setattr(native_plans, "machine_code", lambda plan, capability: b"code")
    for name in ("_modules", "_functions", "_shared_bytes"):
        monkeypatch.setattr(native_plans, name, {})
    compiled_operator._give_driver.cache_clear()
    settings.configure()  # the library drops its plans
    library.fake_forget()
    library.fake_fail_launches(0)
    yield library
    compiled_operator._give_driver.cache_clear()
    settings.configure()


@pytest.fixture
def by_python(monkeypatch):
    """Record the calls that the library passes to Python: the layer's device and addresses."""
    calls = []

    def forward(problem, layer, *addresses):
        calls.append((str(layer), *addresses[:4]))

    monkeypatch.setattr(dispatch, "forward", forward)
    return calls


@pytest.fixture
def node():
    """Return a function that makes nodes, which are closed at the end of the test."""
    with contextlib.ExitStack() as nodes:
        yield lambda *given, **more: nodes.enter_context(closing(LibraryNode(*given, **more)))


def _notes(cuda, kind=""):
    lines = cuda.fake_notes().decode().splitlines()
    return [line for line in lines if line.startswith(kind)]


def _expected(problem, kernel=None, bias=0, gpu=None):
    """Return the launches of a plan as the fake driver records them."""
    gpu = gpu or FakeGpu()
    given = work.forward(problem, 0, 0, 0 if problem.bias else None, 0, False, kernel)
    (plan,) = given.plans(gpu, problem.batch)
    pointers = {"x": X, "w": W, "y": Y, "bias": bias, "workspace": WORKSPACE}
    lines = []
    for launch in plan.launches:
        # "@" uses the alignment of C's compiler.
        form = "@" + "".join("P" if isinstance(a, str) else "i" for a in launch.arguments)
        values = [pointers[a] if isinstance(a, str) else a for a in launch.arguments]
        grid, block = (
            ",".join(map(str, sizes)) for sizes in (grid_of(launch, gpu.processors), launch.block)
        )
        memory = struct.pack(form, *values).hex()
        lines.append(
            f"launch {launch.function} {grid} {block} {launch.shared_bytes} {STREAM} {memory}"
        )
    return lines, plan


@pytest.mark.parametrize(
    "text",
    [
        "b1,c1,h28,w28,m50,k5",
        "b10,c12,h33,w33,m24,k5",
        "b4,c64,h14,w14,m96,k3",
        "b4,c64,h14,w14,m96,k3,bias",
        "b3,c6,h17,w13,m9,k3x2,g3,float64",
        "b3,c6,h17,w13,m9,k3,bias,float16",
    ],
)
def test_what_is_launched(cuda, node, by_python, text):
    problem = ConvProblem.parse(text)
    layer = {"kernel": problem.kernel, "num_filter": problem.filters, "no_bias": not problem.bias}
    made = node({**layer, "num_group": problem.groups}, problem)
    expected, plan = _expected(problem, bias=BIAS if problem.bias else 0)
    inputs = [X, W, BIAS][: 2 + problem.bias]
    for _ in range(2):
        cuda.fake_forget()
        made.requests.clear()
        assert made.forward(inputs, Y)
        assert _notes(cuda) == expected
        assert made.requests == ([plan.workspace_bytes] if plan.workspace_bytes else [])
    assert by_python == []


def test_code_is_loaded_once_and_allowed_its_shared_memory(cuda, node):
    for problem in (PROBLEM, ConvProblem.parse(f"{PROBLEM}")):
        node(LAYER, problem)
    _, plan = _expected(PROBLEM)
    shared = {each.function: each.shared_bytes for each in plan.launches}
    assert _notes(cuda, "load") == ["load code"]
    large = [f"attribute {name} 8 {n}" for name, n in shared.items() if n > 48 << 10]
    assert large
    assert _notes(cuda, "attribute") == large


def test_a_kernel_that_is_asked_for(cuda, node, by_python, monkeypatch):
    assert node({**LAYER, "cuda_kernel": "6_register_tiles"}, PROBLEM).forward([X, W], Y)
    assert _notes(cuda, "launch") == _expected(PROBLEM, "6_register_tiles")[0]
    # Settings that change during a node's life.
    made = node(LAYER, PROBLEM)
    for name in ("1_naive", "6_register_tiles"):
        monkeypatch.setenv("ECE408_KERNEL", name)
        cuda.fake_forget()
        assert made.forward([X, W], Y)
        assert _notes(cuda, "launch") == _expected(PROBLEM, name)[0]
    monkeypatch.delenv("ECE408_KERNEL")
    monkeypatch.setenv("ECE408_PRECISION", "float16")
    cuda.fake_forget()
    assert made.forward([X, W], Y)
    assert _notes(cuda, "launch") != _expected(PROBLEM)[0]
    assert by_python == []


def test_python_computes_with_constants_after_what_is_on_the_stream(
    cuda, node, by_python, monkeypatch
):
    prepared = []
    kernel = {**LAYER, "cuda_kernel": "2_constant_weights"}
    backend = dispatch.Layer(device="gpu", cuda_kernel="2_constant_weights")
    kind = type(dispatch.select(PROBLEM, backend, "forward"))
    monkeypatch.setattr(kind, "prepare", lambda self, problem, direction: prepared.append(problem))
    made = node(kernel, PROBLEM, index=1)
    assert prepared == [PROBLEM]
    assert made.forward([X, W], Y)
    assert by_python == [("gpu(1)", X, W, None, Y)]
    assert _notes(cuda) == [f"wait {STREAM}"]


def test_python_says_why_a_launch_is_refused(cuda, node, monkeypatch):
    refused = errors.GpuFailed("the kernel is refused; restart")
    monkeypatch.setattr(dispatch, "forward", Mock(side_effect=refused))
    cuda.fake_fail_launches(700)
    assert not node(LAYER, PROBLEM).forward([X, W], Y)
    assert str(errors.take_failure()) == "the kernel is refused; restart"


def test_python_computes_where_mxnet_has_no_memory(cuda, node, by_python):
    problem = ConvProblem.parse("b32,c128,h28,w28,m128,k3")
    made = node({"kernel": (3, 3), "num_filter": 128, "no_bias": True}, problem)
    made.workspace = 0
    assert made.forward([X, W], Y)
    assert by_python == [("gpu(0)", X, W, None, Y)]
    assert _notes(cuda, "launch") == []


def test_a_driver_that_fails_is_met_by_the_call(cuda, node, by_python, monkeypatch):
    failed = errors.KernelCompileFailed("it does not compile")
    monkeypatch.setattr(native_plans, "machine_code", Mock(side_effect=failed))
    assert node(LAYER, PROBLEM).forward([X, W], Y)
    assert len(by_python) == 1


def test_op_times(cuda, node):
    made = node({**LAYER, "layer": "first"}, PROBLEM)
    with ece408_op.op_times() as log:
        assert made.forward([X, W], Y)
    launch = _expected(PROBLEM)[0]
    wait, record = f"wait {STREAM}", f"record {STREAM}"
    kinds = [wait, record, *launch, record, wait]
    assert _notes(cuda)[-len(kinds) :] == kinds
    (entry,) = log
    _, plan = _expected(PROBLEM)
    assert (entry.layer, entry.problem, entry.backend) == ("first", PROBLEM, "cuda")
    assert (entry.kernel, entry.precision) == (plan.kernel.name, "float32")
    assert entry.gpu.kernel_seconds == 0.25e-3
    assert 0 < entry.seconds < 1


def test_nodes_on_several_threads(cuda, node, by_python):
    nodes = [node(LAYER, PROBLEM) for _ in range(4)]

    def call(number):
        nodes[number].stream = 100 + number
        return all(nodes[number].forward([X + number, W], Y) for _ in range(20))

    cuda.fake_forget()
    assert all(together(call, range(4)))
    assert by_python == []


@pytest.mark.parametrize(
    ("built_with_cuda", "reason", "expected"),
    [(False, None, False), (True, None, True), (True, "it is too new", True)],
)
def test_where_there_is_an_operator_for_a_gpu(mx, monkeypatch, built_with_cuda, reason, expected):
    seeds = []

    class Features:
        def is_enabled(self, name):
            return built_with_cuda

    def uniform(shape, ctx):
        seeds.append(ctx)
        raise mx.MXNetError("no kernel image is available")

    monkeypatch.setattr(mx.runtime, "Features", Features)
    monkeypatch.setattr(mx.nd.random, "uniform", uniform)
    monkeypatch.setattr(gpu_support, "reason_against", lambda: reason)
    gpu_support.has_random_states.cache_clear()
    for _ in range(2):
        assert compiled_operator.runs_on_gpu(mx.gpu(1)) is expected
    # MXNet would make states for each thread, and keep them.
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(compiled_operator.runs_on_gpu, mx.gpu(1)).result()
    gpu_support.has_random_states.cache_clear()
    assert not compiled_operator.runs_on_gpu(mx.cpu())
    # Only if MXNet cannot seed them, a separate operator runs, once for each copy.
    assert seeds == ([mx.gpu(1)] * 4 if reason else [])


def test_executors_on_a_gpu_are_given_the_compiled_operator(mx, noted, monkeypatch):
    """Record the symbols that MXNet should bind, which its build for the CPU refuses."""
    if mx.runtime.Features().is_enabled("CUDA"):
        pytest.skip("this MXNet binds on GPUs; test_gpu_context.py has what comes of it")
    monkeypatch.setattr(compiled_operator, "runs_on_gpu", lambda context: context == mx.gpu(0))
    written = noted(graph_json, "write", _operators)
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), **LAYER, name="c")
    for context, request, expected in (
        (mx.gpu(0), "null", [True, False]),
        (mx.gpu(0), "write", [False]),
        (mx.gpu(1), "null", [False]),
    ):
        written.clear()
        with pytest.raises((mx.MXNetError, RuntimeError)):
            symbol.simple_bind(context, grad_req=request, data=(1, 12, 33, 33))
        # If the first is refused, the second is bound.
        assert [compiled_operator.NAME in each for each in written] == expected


def _operators(graph, like):
    return [node["op"] for node in graph["nodes"] if node["op"] != "null"]


def test_blocks_on_a_gpu_have_nothing_fused(mx, rng, noted, monkeypatch):
    """On arrays on the CPU that blocks take for arrays on a GPU."""
    monkeypatch.setattr(compiled_operator, "runs_on_gpu", lambda context: True)
    written = noted(graph_json, "write", _operators)

    class Net(mx.gluon.HybridBlock):
        def hybrid_forward(self, F, x, weight):
            return F.relu(ece408_op.Convolution(x, weight, **LAYER))

    net = Net()
    net.hybridize()
    x, w = (mx.nd.array(rng.integers(-3, 4, shape)) for shape in (PROBLEM.x_shape, PROBLEM.w_shape))
    expected = mx.nd.relu(mx.nd.Convolution(x, w, **LAYER)).asnumpy()
    np.testing.assert_array_equal(net(x, w).asnumpy(), expected)
    assert [compiled_operator.NAME, "relu"] in written
