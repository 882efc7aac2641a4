import json
import random
from pathlib import Path

import pytest

from ece408_op.errors import CheckpointMismatch
from ece408_op.files import resources
from ece408_op.network import symbol_file


def _variable(name, **other):
    return {"op": "null", "name": name, "inputs": [], **other}


def _layer(op, name, *inputs, **other):
    return {"op": op, "name": name, "inputs": [list(each) for each in inputs], **other}


def _old(node, attr=()):
    """Return a node as MXNet 0.8 wrote it."""
    return {"param": {}, "backward_source_id": -1, "attr": dict(attr), **node}


def _old_network():
    """Return a network of MXNet 0.8, whose BatchNorm lacks its moving averages."""
    training = {"ctx_group": "stage1", "lr_mult": "0.2"}
    eps = {"param": {"eps": "0.001", "fix_gamma": "False"}}
    nodes = [
        _old(_variable("unused")),
        _old(_variable("data"), training),
        _old(_variable("bn_gamma")),
        _old(_variable("bn_beta")),
        _old(_layer("BatchNorm", "bn", [1, 0], [2, 0], [3, 0], **eps), training),
        _old(_layer("SliceChannel", "halves", [4, 0], param={"num_outputs": "2"})),
        _old(_layer("_Plus", "sum", [5, 1], [5, 0])),
        _old(_layer("_MulScalar", "twice", [6, 0], param={"scalar": "2"})),
        _old(_layer("argmax", "largest", [7, 0], param={"axis": "-1"})),
        _old(_variable("label")),
        _old(_layer("Softmax", "softmax", [7, 0], [9, 0])),
        _old(_layer("max_axis", "most", [7, 0], param={"axis": "1"})),
    ]
    return {"nodes": nodes, "arg_nodes": [0, 1, 2, 3, 9], "heads": [[10, 0], [11, 0], [8, 0]]}


@pytest.fixture
def parsed(tmp_path):
    """Return a function that reads a network from a file."""
    path = tmp_path / "net-symbol.json"

    def parse(document):
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return symbol_file.read(path)

    return parse


def _assert_as_mxnet(mx, symbol, document):
    """Assert that MXNet makes the same of a network."""
    loaded = mx.sym.load_json(json.dumps(document, ensure_ascii=False))
    assert list(symbol.variables) == loaded.list_inputs()
    theirs, ours = json.loads(loaded.tojson(remove_amp_cast=False)), json.loads(symbol.text)
    for node in theirs["nodes"]:
        node.setdefault("attrs", {}).pop("__init__", None)
    assert ours["nodes"] == theirs["nodes"]
    assert (ours["heads"], ours["arg_nodes"]) == (theirs["heads"], theirs["arg_nodes"])


def test_a_network_of_mxnet_0_8_becomes_what_mxnet_makes_of_it(mx, parsed):
    document = _old_network()
    symbol = parsed(document)
    _assert_as_mxnet(mx, symbol, document)
    states = ("bn_gamma", "bn_beta", "bn_moving_mean", "bn_moving_var")
    assert symbol.variables == ("data", *states, "label")
    assert symbol.labels == {"label"}
    assert symbol.parameters == set(states)


def test_networks_are_upgraded_from_the_version_that_wrote_them(mx, parsed):
    # Since 0.9 the moving averages are inputs of BatchNorm.
    states = ("gamma", "beta", "moving_mean", "moving_var")
    nodes = [_variable("data"), *(_variable(f"bn_{name}") for name in states)]
    nodes += [_layer("BatchNorm", "bn", *([n, 0] for n in range(5)), attr={"lr_mult": "2"})]
    nodes += [_layer("argmin", "least", [5, 0], attr={"axis": "-1"})]
    for version in (900, 904, 905, 1000, 10900):
        attributes = {"mxnet_version": ["int", version]}
        document = {"nodes": nodes, "arg_nodes": [*range(5)], "attrs": attributes}
        document["heads"] = [[6, 0, 0]]
        symbol = parsed(document)
        _assert_as_mxnet(mx, symbol, document)
        least = json.loads(symbol.text)["nodes"][-1]
        assert least["attrs"] == ({} if version < 905 else {"axis": "-1"}), version


def test_operators_have_the_names_that_mxnet_gives_them(mx, parsed):
    scalars = ("Plus", "Minus", "RMinus", "Mul", "Div", "RDiv", "Maximum", "Minimum", "Power")
    operators = {
        **{f"_{name}Scalar": (1, {"scalar": "3"}) for name in scalars},
        **{name: (2, {}) for name in ("_Plus", "_Minus", "_Mul", "_Div", "Softmax")},
        **{name: (1, {"axis": "1"}) for name in ("max_axis", "sum_axis")},
        **{"identity": (1, {}), "ElementWiseSum": (2, {"num_args": "2"})},
    }
    for op, (inputs, param) in operators.items():
        nodes = [_variable(name) for name in ("a", "b")[:inputs]]
        nodes += [_layer(op, "x", *([n, 0] for n in range(inputs)), param=param)]
        document = {"nodes": nodes, "arg_nodes": [*range(inputs)], "heads": [[inputs, 0]]}
        symbol = parsed(document)
        _assert_as_mxnet(mx, symbol, document)
        assert symbol.labels == ({"b"} if op == "Softmax" else set()), op


def test_networks_of_this_version(mx, parsed):
    files = sorted(resources.models_dir().glob("*/*-symbol.json"))
    assert files
    for path in files:
        document = json.loads(path.read_text())
        symbol = parsed(document)
        _assert_as_mxnet(mx, symbol, document)
        assert symbol.labels == {"softmax_label"}, path
        assert set(symbol.variables) == {"data", "softmax_label", *symbol.parameters}, path


def test_the_courses_operator_is_ours(parsed):
    nodes = [_variable("data"), _variable("w"), _layer("New", "conv1", [0, 0], [1, 0])]
    nodes[2]["param"] = {"kernel": "(5L, 5L)", "num_filter": "10"}
    symbol = parsed({"nodes": nodes, "heads": [[2, 0]]})
    node = json.loads(symbol.text)["nodes"][2]
    own = {"op_type": "ece408_conv", "layer": "conv1", "no_bias": "True"}
    assert node["op"] == "Custom"
    assert node["attrs"] == {"kernel": "(5, 5)", "num_filter": "10", **own}
    assert symbol.parameters == {"w"}


def test_an_array_that_something_else_reads_is_not_a_label(parsed):
    nodes = [_variable("data"), _variable("mask"), _layer("SoftmaxOutput", "a", [0, 0], [1, 0])]
    nodes += [_layer("_mul", "b", [2, 0], [1, 0])]
    assert parsed({"nodes": nodes, "heads": [[2, 0]]}).labels == {"mask"}
    assert parsed({"nodes": nodes, "heads": [[3, 0]]}).labels == set()
    for name in ("LinearRegression", "LogisticRegression", "MAERegression", "SVM"):
        nodes[2]["op"] = f"{name}Output"
        assert parsed({"nodes": nodes, "heads": [[2, 0]]}).labels == {"mask"}, name


def test_what_is_wrong_is_said_in_one_line(parsed, tmp_path):
    a, one = _variable("a"), [[0, 0]]
    relu, both = _layer("relu", "r", [0, 0]), _layer("_plus", "x", [0, 0], [1, 0])
    twice = {**a, "name": "\udc80\x1b[31m"}
    wrong = {
        "JSON is wrong": "{",
        "nested too deeply": "[" * 200000,
        "it is a list": "[]",
        "number NaN": '{"nodes": NaN}',
        "number 99999999999999": '{"nodes": ' + "9" * 100000 + "}",
        "nodes is missing": {"heads": one},
        "node 0 is a int": {"nodes": [1], "heads": one},
        "node 0's op is missing": {"nodes": [{}], "heads": one},
        "node 0's op is a dict": {"nodes": [{**a, "op": {}}], "heads": one},
        "node 0's name is a int": {"nodes": [{**a, "name": 1}], "heads": one},
        "node 0's k is a bool": {"nodes": [{**a, "attrs": {"k": True}}], "heads": one},
        "node 0's attr is a list": {"nodes": [{**a, "attr": []}], "heads": one},
        "variable that has inputs": {"nodes": [a, {**a, "inputs": one}], "heads": one},
        "2 variables of the name a": {"nodes": [a, a, both], "heads": [[2, 0]]},
        "output 0 of node 1, which is not before": {"nodes": [a, {**relu, "inputs": [[1, 0]]}]},
        "output 0 of node -1": {"nodes": [a, {**relu, "inputs": [[-1, 0]]}]},
        "output -1 of node 0": {"nodes": [a], "heads": [[0, -1]]},
        "has 1 numbers": {"nodes": [a], "heads": [[0]]},
        "has 4 numbers": {"nodes": [a], "heads": [[0, 0, 0, 0]]},
        "a number of heads is a float": {"nodes": [a], "heads": [[0.0, 0]]},
        "a number of heads is a bool": {"nodes": [a], "heads": [[False, 0]]},
        "heads is missing": {"nodes": [a]},
        "it has no outputs": {"nodes": [a], "heads": []},
        "attrs is a list": {"nodes": [a], "heads": one, "attrs": []},
        "mxnet_version is a int": {"nodes": [a], "heads": one, "attrs": {"mxnet_version": 1}},
        r"name \\udc80\\x1b\[31m": {"nodes": [twice, twice, both], "heads": [[2, 0]]},
    }
    for message, document in wrong.items():
        with pytest.raises(CheckpointMismatch, match=message) as raised:
            parsed(document)
        text = str(raised.value)
        assert text.startswith(f"{tmp_path}/net-symbol.json is not a network of MXNet: "), message
        assert len(text) < 600, message
        assert text.isprintable(), message
    (tmp_path / "bytes-symbol.json").write_bytes(b'{"nodes": "\xff"}')
    with pytest.raises(CheckpointMismatch, match="byte 11 is not UTF-8"):
        symbol_file.read(tmp_path / "bytes-symbol.json")
    with pytest.raises(CheckpointMismatch, match="cannot be read: Is a directory"):
        symbol_file.read(tmp_path)


def test_a_chain_of_many_nodes_needs_no_deep_stack(parsed):
    count = 20000
    nodes = [_variable("data"), *(_layer("relu", f"r{n}", [n, 0]) for n in range(count))]
    symbol = parsed({"nodes": nodes, "heads": [[count, 0]]})
    assert len(json.loads(symbol.text)["nodes"]) == count + 1


def _assert_sound(symbol):
    graph = json.loads(symbol.text)
    for number, node in enumerate(graph["nodes"]):
        assert all(0 <= entry[0] < number for entry in node["inputs"])
        assert all(type(text) is str for text in node["attrs"].values())
    variables = [node["name"] for node in graph["nodes"] if node["op"] == "null"]
    assert list(symbol.variables) == variables
    assert symbol.labels | symbol.parameters <= set(variables)


def _with_another_value(draws):
    """Return the network with a value of any kind put anywhere."""
    values = (None, True, -1, 3, 10**17, 1.5, "", "null", "BatchNorm", [], {}, [[0, 0]], {"a": "b"})
    document = at = _old_network()
    while True:
        key = draws.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], (dict, list)) or not at[key] or draws.random() < 0.2:
            break
        at = at[key]
    at[key] = draws.choice(values)
    return json.dumps(document)


def _refused(text):
    """Return the error's text, or `None` for a sound network."""
    try:
        _assert_sound(symbol_file.parse(text, Path("net-symbol.json")))
    except CheckpointMismatch as error:
        return str(error)
    return None


def test_damaged_files_are_an_error_or_a_sound_network():
    whole = json.dumps(_old_network())
    draws, refused = random.Random(408), 0
    for number in range(2000):
        text = _with_another_value(draws)
        if number % 2:
            place, other = draws.randrange(len(whole)), draws.choice('{}[],:"\\019-e.ntfL\0é')
            text = whole[:place] + other + whole[place + 1 :]
        reason = _refused(text)
        if reason is not None:
            assert reason.isprintable(), text
            refused += 1
    assert 500 < refused < 1900
