import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ece408_op.errors import CheckpointMismatch
from ece408_op.network import params_file

PATH = Path("net-0001.params")
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")


def _file(records, names):
    head = struct.pack("<QQQ", 0x112, 0, len(records)) + b"".join(records)
    names = [struct.pack("<Q", len(name)) + name for name in names]
    return head + struct.pack("<Q", len(names)) + b"".join(names)


def _record(array, version=V2, code=0):
    """Return an array as a version of MXNet wrote it; version 0 is before versions."""
    dims = array.shape
    head = struct.pack("<Ii", version, 0) if version in (V2, V3) else struct.pack("<I", version)
    shape = struct.pack(f"<i{len(dims)}q", len(dims), *dims)
    if not version:
        head, shape = b"", struct.pack(f"<{len(dims) + 1}I", len(dims), *dims)
    return head + shape + struct.pack("<iii", 1, 0, code) + array.tobytes()


@pytest.fixture
def written(tmp_path):
    """Return a function that writes bytes and returns the file."""
    path = tmp_path / "net-0001.params"

    def write(content):
        path.write_bytes(content)
        return path

    return write


def _assert_same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].flags.aligned, name
        np.testing.assert_array_equal(found[name], array, name)


def test_arrays_that_mxnet_saved(mx, tmp_path, rng):
    path = tmp_path / "net.params"
    shapes = ((1,), (3,), (5, 7), (2, 3, 1, 4))
    expected = {
        f"arg:{dtype} {shape}": rng.integers(-100, 100, shape).astype(dtype)
        for dtype in DTYPES
        for shape in shapes
    }
    arrays = {name: mx.nd.array(array, dtype=array.dtype) for name, array in expected.items()}
    mx.nd.save(str(path), {**arrays, "aux:é": arrays["arg:int8 (3,)"]})
    _assert_same(params_file.read(path), {**expected, "aux:é": expected["arg:int8 (3,)"]})
    mx.nd.save(str(path), {})
    assert params_file.read(path) == {}


def test_scalars_and_empty_arrays_of_the_numpy_interface(mx, tmp_path):
    path = tmp_path / "net.params"
    expected = {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4), "int64")}
    with mx.util.np_shape(True), mx.util.np_array(True):
        arrays = {name: mx.np.array(array, dtype=array.dtype) for name, array in expected.items()}
        mx.npx.save(str(path), arrays)
    _assert_same(params_file.read(path), expected)


def test_arrays_that_mxnet_had_not_allocated_have_no_elements(written):
    expected = {"none": np.zeros(0, "float32"), "one": np.ones(1, "float32")}
    for version, head in {V1: "0", V2: "00", V3: "0-", 0: ""}.items():
        numbers = [{"0": 0, "-": -1}[each] for each in head]
        record = struct.pack(f"<I{len(head)}i", version, *numbers)
        path = written(_file([record, _record(expected["one"])], [b"none", b"one"]))
        _assert_same(params_file.read(path), expected)


def test_records_of_every_version(mx, written, rng):
    array = rng.random((2, 3, 4)).astype("float32")
    for version in (0, V1, V2):
        path = written(_file([_record(array, version)], [b"w"]))
        _assert_same(params_file.read(path), {"w": array})
        np.testing.assert_array_equal(mx.nd.load(str(path))["w"].asnumpy(), array, str(version))
    _assert_same(params_file.read(written(_file([_record(array, V3)], [b"w"]))), {"w": array})


def test_other_types(written):
    codes = {8: "int16", 9: "uint16", 10: "uint32", 11: "uint64"}
    for code, dtype in codes.items():
        array = np.arange(5, dtype=dtype)
        _assert_same(
            params_file.read(written(_file([_record(array, V2, code)], [b"w"]))), {"w": array}
        )
    values = np.array([1.5, -0.25, np.inf, 3e38], "float32").view("uint32") & 0xFFFF0000
    halves = (values >> 16).astype("uint16")
    found = params_file.read(written(_file([_record(halves, V2, 12)], [b"w"])))
    _assert_same(found, {"w": values.view("float32")})


def test_names_are_split():
    arrays = {name: np.ones(1) for name in ("arg:a", "aux:b", "c", "arg:aux:d", "aux:")}
    assert [list(each) for each in params_file.split(arrays)] == [["a", "c", "aux:d"], ["b", ""]]


def test_what_a_parameter_file_must_not_hold(mx, tmp_path, written):
    path = tmp_path / "net.params"
    for stype in ("row_sparse", "csr"):
        mx.nd.save(str(path), {"w": mx.nd.zeros((2, 3), stype=stype)})
        with pytest.raises(CheckpointMismatch, match=rf"array 0 is {stype}.*tostype\('default'\)"):
            params_file.read(path)
    mx.nd.save(str(path), [mx.nd.ones(1)])
    with pytest.raises(CheckpointMismatch, match="1 arrays and 0 names; save a dict"):
        params_file.read(path)

    one, huge = np.ones(1, "float32"), struct.pack("<Iiiqqq", V2, 0, 3, 2**62, 2**62, 2**62)
    wrong = {
        "not a parameter file of MXNet": b"<html>not found</html>",
        "its head needs 8 bytes": struct.pack("<Q", 0x112),
        "99999999999 arrays do not fit": struct.pack("<QQQ", 0x112, 0, 99999999999),
        "begins with 0xbad": _file([struct.pack("<I", 0xBAD)], [b"w"]),
        "unknown type 99": _file([_record(one, code=99)], [b"w"]),
        "unknown type -1": _file([_record(one, code=-1)], [b"w"]),
        "unknown way 7": _file([struct.pack("<Ii", V2, 7)], [b"w"]),
        "33 dimensions": _file([struct.pack("<Iii", V2, 0, 33)], [b"w"]),
        "-5 dimensions": _file([struct.pack("<Iii", V3, 0, -5)], [b"w"]),
        r"shape \(-2,\)": _file([struct.pack("<Iiiq", V2, 0, 1, -2)], [b"w"]),
        f"needs {2**188} bytes": _file([huge + struct.pack("<iii", 1, 0, 0)], [b"w"]),
        "has shape": _file([struct.pack("<Iiiqqqiii", V2, 0, 3, 2**62, 0, 2**62, 1, 0, 0)], [b"w"]),
        "name 0 is not UTF-8": _file([_record(one)], [b"\xff"]),
        "name 0 needs 1099511627776 bytes": _file([_record(one)], [b""])[:-8]
        + struct.pack("<Q", 2**40),
    }
    for message, content in wrong.items():
        with pytest.raises(CheckpointMismatch, match=message) as raised:
            params_file.read(written(content))
        assert str(path.parent) in str(raised.value), message
        assert "\n" not in str(raised.value), message
    with pytest.raises(CheckpointMismatch, match="cannot be read: Is a directory"):
        params_file.read(tmp_path)


def _small_file(rng):
    """Return a file with every version, and its arrays, whose bytes are nowhere else in it."""
    arrays = {
        f"arg:{version:x}": rng.integers(1, 2**31, (version % 5 + 1, 3)).astype("int32")
        for version in (0, V1, V2, V3)
    }
    records = [_record(array, int(name[4:], 16), 4) for name, array in arrays.items()]
    return _file(records, [name.encode() for name in arrays]), arrays


def test_a_file_that_is_cut_short_is_one_error(rng):
    content, arrays = _small_file(rng)
    _assert_same(params_file.parse(content, PATH), arrays)
    for length in range(len(content)):
        with pytest.raises(CheckpointMismatch, match="copy"):
            params_file.parse(content[:length], PATH)


def _parsed(content):
    """Return the arrays, or the error's text; memory is bounded by the file's size."""
    tracemalloc.clear_traces()
    try:
        return params_file.parse(content, PATH)
    except CheckpointMismatch as error:
        return str(error)
    finally:
        assert tracemalloc.get_traced_memory()[1] < 2 * len(content) + 30000, content


def test_damaged_files_are_an_error_or_hold_the_damaged_numbers(rng):
    content, arrays = _small_file(rng)
    places = {content.index(array.tobytes()): array.nbytes for array in arrays.values()}
    draws, refused = random.Random(408), 0
    tracemalloc.start()
    for _ in range(3000):
        damaged, place = bytearray(content), draws.randrange(len(content))
        damaged[place] ^= draws.randrange(1, 256)
        found = _parsed(bytes(damaged))
        inside = [n for n, start in enumerate(places) if 0 <= place - start < places[start]]
        if isinstance(found, str):
            assert not inside, (place, found)
            assert "\n" not in found
            refused += 1
        elif inside:
            start, array = list(places)[inside[0]], list(found.values())[inside[0]]
            assert array.tobytes() == bytes(damaged[start : start + array.nbytes]), place
        else:
            assert sum(array.nbytes for array in found.values()) <= len(content), place
    tracemalloc.stop()
    assert 500 < refused < 2500


def test_random_bytes_after_the_head_are_an_error():
    draws = random.Random(408)
    for number in range(1000):
        head = struct.pack("<QQQ", 0x112, 0, draws.choice((1, 2, 5)))
        version = struct.pack("<I", draws.choice((0, 1, 4, V1, V2, V3)))
        with pytest.raises(CheckpointMismatch):
            params_file.parse(head + version + draws.randbytes(number), PATH)
