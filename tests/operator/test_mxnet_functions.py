import functools
import shutil
from pathlib import Path

import pytest

# Prints a line for each function that MXNet makes of an operator: all its attributes, without
# addresses.
_FUNCTIONS = """
import hashlib, inspect, sys, types
{first}
import mxnet as mx

def content(code):
    constants = [
        content(each) if isinstance(each, types.CodeType)
        else "address" if isinstance(each, int) and each > 1 << 20 else repr(each)
        for each in code.co_consts
    ]
    return (code.co_code.hex(), code.co_names, code.co_varnames, code.co_filename, constants)

modules = {{
    name: module for name, module in sorted(sys.modules.items())
    if name.startswith(("mxnet.ndarray", "mxnet.symbol"))
}}
found = [
    repr((name, key, str(inspect.signature(each)), each.__module__, each.__doc__,
          content(each.__code__)))
    for name, module in modules.items() for key, each in sorted(vars(module).items())
    if isinstance(each, types.FunctionType) and each.__code__.co_filename == "<string>"
]
assert len(found) > 2000
print(len(found), hashlib.sha256("\\n".join(found).encode()).hexdigest())
assert "exec" not in vars(modules["mxnet.ndarray.register"])
assert inspect.getsource(modules["mxnet.symbol.register"])
x = mx.nd.array([[-1, 2]])
assert mx.nd.relu(x).asnumpy().tolist() == [[0, 2]]
assert (mx.np.array([1, 2]) + mx.np.ones(2)).tolist() == [2, 3]
dense = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="dense")
assert dense.infer_shape(data=(5, 2))[1] == [(5, 3)]
"""
_OURS = _FUNCTIONS.format(first="import ece408_op")
_PLAIN = f"""{_FUNCTIONS.format(first="import numpy; numpy.bool = bool")}
assert "ece408_op" not in sys.modules
import ece408_op
print(mx.sym.Custom(mx.sym.Variable("x"), op_type="ece408_conv", kernel=(3, 3), num_filter=4,
                    name="c").list_arguments())
"""


@pytest.fixture(scope="module")
def functions_in(run_python):
    """Return a process's description of MXNet's functions with this cache."""

    def run(cache: Path, program: str = _OURS) -> str:
        result = run_python(program, ECE408_CACHE=str(cache))
        assert (result.returncode, result.stderr) == (0, "")
        return result.stdout

    return run


@pytest.fixture(scope="module")
def first(functions_in, tmp_path_factory):
    """Return a cache that a process has written, and that process's output."""
    cache = tmp_path_factory.mktemp("first") / "cache"
    return cache, functions_in(cache)


@pytest.fixture
def functions(functions_in, first, tmp_path):
    """Return the output of a process with a copy of that cache."""
    shutil.copytree(first[0], tmp_path / "cache")
    return functools.partial(functions_in, tmp_path / "cache")


@pytest.fixture
def kept(tmp_path):
    def find():
        (found,) = (tmp_path / "cache" / "mxnet-functions").glob("*.bin")
        return found

    return find


@pytest.mark.slow
def test_functions_from_the_cache_are_those_that_mxnet_makes(functions, first, kept):
    """Without them, our operator is registered when the package is imported later."""
    plain, arguments = functions(_PLAIN).splitlines(keepends=True)
    assert arguments == "['x', 'c_weight', 'c_bias']\n"
    assert first[1] == plain
    before = kept().stat()
    assert functions() == plain
    assert kept().stat().st_mtime_ns == before.st_mtime_ns


def test_damaged_code_is_not_used(functions, first, kept):
    content = kept().read_bytes()
    kept().write_bytes(content[:1000] + b"?" + content[1001:])
    assert functions() == first[1]
    assert len(kept().read_bytes()) == len(content)


@pytest.mark.slow
def test_code_that_others_can_have_written_is_not_used(functions, first, kept):
    kept().chmod(0o666)
    assert functions() == first[1]
    assert kept().stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_done_without(functions_in, first, tmp_path):
    (tmp_path / "cache").write_text("")
    assert functions_in(tmp_path / "cache") == first[1]
