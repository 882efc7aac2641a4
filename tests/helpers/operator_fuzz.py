"""Random chains of operators by `to_gpu` in the emulator, and by `to_cpu`, compared with MXNet.

python tests/helpers/operator_fuzz.py --cases 500 --seed 1 --jobs 2
python tests/helpers/operator_fuzz.py --seed 1 --case 17
"""

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import operator_draws
import programs
from compiled_together import MachineOfMany

import ece408_op
from ece408_op import settings
from ece408_op.files.markdown import table
from ece408_op.network import resident
from ece408_op.network.machines import emulated
from ece408_op.operator.array_memory import make_plain
from ece408_op.operator.graphs import partition
from ece408_op.operator.loading import load_mxnet

# Number of cases whose kernels are compiled together.
TOGETHER = 100
# Allowed errors, relative to a result's largest element: float32's roundings, and a factor over
# MXNet's own error, measured with float64, or over the effect of rounded inputs.
BELOW, FACTOR = 1e-5, 8
# A largest element below this is only rounding of inputs of about 1.
_LEAST = 0.2
# Larger errors of MXNet's are not roundings.
_MOST_OF_MXNET = 1e-2
_MOST_ELEMENTS = 40000
_MOST_OF_AXIS = {1: 40, 2: 30, 3: 11, 4: 9, 5: 4, 6: 3}
_EXACT, _ROUNDING = 2**24, 2**-21
_MOST_ATTEMPTS = 1000
_ACTIVATIONS = {"activation", "leakyrelu"}
# How often the inputs are perturbed before a result is wrong: a single time may change little by
# chance.
_MOVES = 5


@dataclass
class Chain:
    """A Symbol, the shapes of its inputs, its nodes' operators by name, and whether whole numbers
    stay whole."""

    symbol: object
    shapes: dict
    kinds: dict
    exact: bool


def chain(mx, rng, first):
    """Draw a random chain whose first node is of this operator."""
    for _ in range(_MOST_ATTEMPTS):
        found = _chain(mx, rng, first)
        if found is not None:
            return found
    raise AssertionError(f"MXNet takes no chain with {first} that has been drawn")


def _chain(mx, rng, first):
    """Draw a chain; return `None` if MXNet rejects it."""
    nodes = operator_draws.NODES
    axes = rng.choice(nodes[first].axes)
    batch = rng.choice([1, 2, 3, 5, rng.randint(1, 130)])
    shape = (batch, *(rng.randint(1, _MOST_OF_AXIS[axes]) for _ in range(axes - 1)))
    draw = operator_draws.Draw(mx.sym, rng)
    x, kinds, exact = mx.sym.Variable("data"), {}, True
    made = []
    wanted = [first, *rng.choices(list(nodes), k=rng.randint(0, 2))]
    if rng.random() < 0.3:
        wanted.insert(0, rng.choice(["Convolution", "FullyConnected", "Deconvolution"]))
    for kind in wanted:
        given = _sizes(x, data=shape)[1] if made else [shape]
        try:
            node, name = nodes[kind].node(draw, kind, x, given[0])
        except (operator_draws.Unfit, mx.MXNetError, ValueError):
            continue
        if not _sizes(node, data=shape)[1]:
            continue
        x, kinds[name] = node, kind
        exact = exact and nodes[kind].exact
        made.append(x)
    if first not in kinds.values():
        return None
    # MXNet's LeakyReLU overwrites its input even if the input is an output.
    last = next(reversed(kinds.values()))
    if len(made) > 1 and last != "LeakyReLU" and rng.random() < 0.2:
        x = mx.sym.Group([made[-1], made[-2]])
    shapes = {"data": shape}
    known = dict(zip(x.list_arguments(), _sizes(x, data=shape)[0]))
    shapes |= {name: known[name] for name in draw.inputs if name in known}
    return Chain(x, shapes, kinds, exact)


def _sizes(symbol, **shapes):
    """Return sizes of arguments and outputs; two empty lists if some are unknown or too large."""
    from mxnet import MXNetError

    try:
        # Unlike `infer_shape` it prints nothing.
        arguments, outputs, _ = symbol.infer_shape_partial(**shapes)
    except MXNetError:
        return [], []
    if all(shape and 0 < np.prod(shape) <= _MOST_ELEMENTS for shape in (*arguments, *outputs)):
        return arguments, outputs
    return [], []


@dataclass
class Call:
    """All arguments by name, and MXNet's results in float32 and in float64."""

    found: dict
    reference: list
    exact: list


class Case:
    """A random chain with random arrays, by the seed and its number."""

    def __init__(self, mx, seed, number):
        self.mx, self.number = mx, number
        self.rng = random.Random(f"{seed}/{number}")
        kinds = sorted(operator_draws.NODES)
        self.chain = chain(mx, self.rng, kinds[number % len(kinds)])
        self.values = np.random.default_rng([seed, number])
        self.whole = self.rng.random() < 0.5
        self.pixels = self.rng.random() < 0.1
        # Infinities and NaN.
        self.odd = self.chain.exact and self.rng.random() < 0.2
        # Bytes of a chunk, by number of images.
        self.chunk = self.rng.choice([None, None, 1, 2, 5])

    def _arrays(self, names, shapes):
        return {name: self._random(name, shape) for name, shape in zip(names, shapes)}

    def _random(self, name, shape):
        if name == "data" and self.pixels:
            return self.values.integers(0, 256, shape).astype(np.uint8)
        if self.whole:
            found = self.values.integers(-3, 4, shape).astype(np.float32)
        else:
            found = self.values.standard_normal(shape).astype(np.float32)
        if self.odd and name == "data":
            some = self.values.random(shape) < 0.1
            found[some] = self.values.choice([np.nan, np.inf, -np.inf], some.sum())
        return found

    def _expected(self, found, dtype, aux=None, symbol=None):
        """Return MXNet's results."""
        mx, symbol = self.mx, self.chain.symbol if symbol is None else symbol
        if dtype == "float64":
            named = ('"dtype": "float32"', '"dtype": "float64"')
            symbol = mx.sym.load_json(symbol.tojson().replace(*named))
        held, states = (
            {name: mx.nd.array(each, dtype=dtype) for name, each in every.items()}
            for every in (found, aux or self.aux)
        )
        # oneDNN's fusion of a convolution and BatchNorm writes out of bounds unless the axis is 1.
        with mock.patch.dict(os.environ, {"MXNET_SUBGRAPH_BACKEND": "NONE"}):
            executor = symbol.bind(mx.cpu(), held, aux_states=states, grad_req="null")
        return [each.asnumpy() for each in executor.forward(is_train=False)]

    def _call(self, found):
        """Return a call with these arguments; `None` if MXNet does not compute it."""
        try:
            reference = self._expected(found, "float32")
        except self.mx.MXNetError:
            return None
        # MXNet's deconvolution in float64 is wrong with a dilation and a stride.
        dilates = (each.get("dilate", "") for each in self.chain.symbol.attr_dict().values())
        if "Deconvolution" in self.chain.kinds.values() and any("2" in each for each in dilates):
            return Call(found, reference, reference)
        try:
            return Call(found, reference, self._expected(found, "float64"))
        except self.mx.MXNetError:
            return Call(found, reference, reference)

    def _others(self):
        """Return a call with the same parameters and another number of images, if the chain allows
        it."""
        if "reshape_like" in self.chain.kinds.values():
            # MXNet's does not check the sizes of its arrays, and reads out of bounds.
            return None
        shapes, images = self.chain.shapes, self.rng.randint(1, 12)
        batch = shapes["data"][0]
        if not {"Reshape", "reshape"}.isdisjoint(self.chain.kinds.values()):
            # Nor does Reshape.
            images = batch * self.rng.randint(1, 2)
        shapes = {n: (images, *s[1:]) if s[0] == batch else s for n, s in shapes.items()}
        arguments = dict(zip(self.found, _sizes(self.chain.symbol, **shapes)[0]))
        same = [arguments.get(name) == self.found[name].shape for name in self.parameters]
        if not arguments or not all(same):
            return None
        data = self._arrays(arguments, arguments.values())
        found = {**data, **{name: self.found[name] for name in self.parameters}}
        try:
            # MXNet hides that a node fails of which only the shape is used.
            self._expected(found, "float32", symbol=self.chain.symbol.get_internals())
        except self.mx.MXNetError:
            return None
        return self._call(found)

    def rehearse(self):
        """Draw the arrays, and run once on kernels that do nothing; return whether MXNet computes
        it."""
        mx, symbol = self.mx, self.chain.symbol
        arguments, _, states = symbol.infer_shape(**self.chain.shapes)
        self.found = self._arrays(symbol.list_arguments(), arguments)
        aux = zip(symbol.list_auxiliary_states(), states)
        self.aux = {n: self.values.uniform(0.5, 1.5, s).astype(np.float32) for n, s in aux}
        self.parameters = [
            name
            for name in self.found
            if name not in self.chain.shapes and not name.endswith("label")
        ]
        call = self._call(self.found)
        if call is None:
            return False
        other = self._others() if self.rng.random() < 0.3 else call
        self.calls = [call, other or call, call]
        self.held, self.states = (
            {name: mx.nd.zeros(each[name].shape) for name in names}
            for names, each in ((self.parameters, self.found), (self.aux, self.aux))
        )
        self.network = ece408_op.to_gpu(symbol, self.held, self.states)
        self.on_cpu = ece408_op.to_cpu(symbol, self.held, self.states)
        for call in self.calls:
            self._run(self.network, call, np.zeros_like)
        return True

    def _run(self, network, call, of=np.copy):
        data = [of(call.found[name]) for name in self.found if name in self.chain.shapes]
        nbytes = self.chunk and self.chunk * sum(each.nbytes // len(each) for each in data)
        data = [self.mx.nd.array(each, dtype=each.dtype) for each in data]
        with mock.patch.object(resident, "_CHUNK_BYTES", nbytes or resident._CHUNK_BYTES):
            found = network(*data)
            found = found if isinstance(found, list) else [found]
            return [each.asnumpy() for each in found]

    def wrong(self):
        """Return the error in the network's results, or `None`."""
        for arrays, values in ((self.held, self.found), (self.states, self.aux)):
            # MXNet does not always write arrays in a layout of oneDNN's.
            make_plain(list(arrays.values()))
            for name, array in arrays.items():
                array[:] = self.mx.nd.array(values[name])
        for call in self.calls:
            for network in (self.network, self.on_cpu):
                found = self._run(network, call)
                for number, each in enumerate(zip(found, call.reference, call.exact)):
                    moved = functools.partial(self._moved, call, number)
                    reason = difference(*each, self.whole and self.chain.exact, moved)
                    if reason is not None and not self._is_odd(call):
                        where = f"{len(call.found['data'])} images, on the {network._on}"
                        return f"output {number} for {where}: {reason}"
        return None

    def _is_odd(self, call):
        """Tell whether infinities or NaN are read where results then depend on the implementation:
        by a softmax, a resizing (a weight of 0 is a rounding from others), LRN (MXNet's running sum
        keeps a NaN), or an activation that MXNet computes in float32 alone."""
        kinds = {kind.lower() for kind in self.chain.kinds.values()}
        is_in_float32 = call.exact is call.reference and not kinds.isdisjoint(_ACTIVATIONS)
        unsure = ("softmax", "resize", "lrn")
        if not is_in_float32 and not any(name in kind for kind in kinds for name in unsure):
            return False
        symbol = self.chain.symbol.get_internals()
        found = self._expected(call.found, "float32", symbol=symbol)
        return not all(np.isfinite(each).all() for each in found)

    def _moved(self, call, number, steps=(0,)):
        """Return MXNet's result in float64, or in float32 if it has none, of arrays perturbed by
        float32's roundings, every array of the chain rounded to multiples of such a rounding and
        shifted by some of these `steps`."""

        def near(arrays):
            return {
                name: each * (1 + self.values.uniform(-_ROUNDING, _ROUNDING, each.shape))
                for name, each in arrays.items()
            }

        dtype = "float32" if call.exact is call.reference else "float64"
        found, aux = near(call.found), near(self.aux)
        internals = self.chain.symbol.get_internals()
        largest = map(_largest, self._expected(found, dtype, aux, internals))
        largest = dict(zip(internals.list_outputs(), largest))
        shift = functools.partial(self.values.choice, steps)
        rounded = _rounding(self.mx, self.chain.symbol, largest, shift)
        return self._expected(found, dtype, aux, rounded)[number]

    def left(self):
        """Return names of the nodes left to MXNet."""
        return self.network.report.left

    def __str__(self):
        chain = self.chain
        how = [name for name in ("whole", "pixels", "odd") if getattr(self, name)]
        how += [f"chunks of {self.chunk}"] * bool(self.chunk)
        return f"case {self.number}, {chain.shapes}, {list(chain.kinds.values())} {' '.join(how)}"


def _largest(values):
    return np.abs(values[np.isfinite(values)]).max(initial=0)


def _rounding(mx, symbol, largest, shift):
    """Return the symbol with the operators' results rounded to multiples of `_ROUNDING` of their
    `largest` element, by name: what is left of a sum that cancels becomes 0, or the multiple that
    `shift` returns."""
    graph = json.loads(symbol.tojson())
    nodes, places = [], {}

    def added(op, name, inputs, attributes):
        nodes.append({"op": op, "name": name, "inputs": inputs, "attrs": attributes})
        return [len(nodes) - 1, 0, 0]

    def place(entry):
        old, output = graph["nodes"][entry[0]], entry[1]
        names = (f"{old['name']}_output", f"{old['name']}_output{output}")
        found = [largest[name] for name in names if largest.get(name)]
        if (entry[0], output) not in places:
            at = [places[entry[0], None][0], output, 0]
            if old["op"] != "null" and found:
                step = 2.0 ** np.floor(np.log2(found[0] * _ROUNDING))
                at = added("_div_scalar", f"{names[1]}_steps", [at], {"scalar": repr(step)})
                at = added("rint", f"{names[1]}_whole", [at], {})
                at = added("_plus_scalar", f"{names[1]}_shift", [at], {"scalar": str(shift())})
                at = added("_mul_scalar", f"{names[1]}_rounded", [at], {"scalar": repr(step)})
            places[entry[0], output] = at
        return places[entry[0], output]

    for number, node in enumerate(graph["nodes"]):
        inputs = [place(entry) for entry in node["inputs"]]
        places[number, None] = added(node["op"], node["name"], inputs, node.get("attrs", {}))
    graph["heads"] = [[places[number, None][0], output, 0] for number, output, _ in graph["heads"]]
    graph["arg_nodes"] = [number for number, node in enumerate(nodes) if node["op"] == "null"]
    del graph["node_row_ptr"]
    return mx.sym.load_json(json.dumps({**graph, "nodes": nodes}))


def _same_infinities(found, reference, exact, finite, moved):
    """Tell whether infinities and NaN are equal to those of either. Where a sum cancels, to 0 or to
    a rounding, they need not be: roundings of the inputs make its reciprocal finite."""
    same = finite | (np.isnan(found) & np.isnan(reference))
    same |= (found == reference) | (found == exact)
    return same.all() or (same | np.isfinite(moved())).all()


def difference(found, reference, exact, is_whole, moved):
    """Return the error of a result beside MXNet's in float32 and float64, or `None`; `moved`
    returns another acceptable float64 result."""
    if found.shape != reference.shape:
        return f"shape {found.shape}, not {reference.shape}"
    is_whole = is_whole and np.array_equal(reference, exact) and np.abs(exact).max() < _EXACT
    if is_whole and np.array_equal(exact, np.rint(exact)):
        bad = found != reference
        return f"{bad.sum()} of {bad.size} whole numbers are others" if bad.any() else None
    finite = np.isfinite(reference)
    if not np.array_equal(finite, np.isfinite(exact)):
        finite &= np.isfinite(exact)
    elif not _same_infinities(found, reference, exact, finite, moved):
        return "other infinities or NaN"
    if not finite.any():
        return None
    largest = max(_LEAST, np.abs(reference[finite]).max())

    def apart(a, b):
        return np.abs(a[finite] - b[finite]).max() / largest

    error, allowed = min(apart(found, reference), apart(found, exact)), BELOW
    shifted = functools.partial(moved, (-1, 0, 1))
    for other in (lambda: reference, moved, *_MOVES * [shifted]):
        if error <= allowed:
            return None
        value = other()
        # Reciprocals of sums that cancel, which roundings change at will; arguments of square roots
        # that roundings make negative.
        with np.errstate(invalid="ignore"):
            finite &= np.abs(value - exact) <= _MOST_OF_MXNET * largest
        if not finite.any():
            return None
        allowed = max(allowed, FACTOR * apart(value, exact))
        error = min(apart(found, reference), apart(found, exact))
    return None if error <= allowed else f"error {error:.2e}, allowed {allowed:.2e}"


@dataclass
class Counts:
    """Counters of an operator: nodes drawn, computed on the GPU, and left to MXNet."""

    drawn: int = 0
    gpu: int = 0
    left: int = 0


@dataclass
class Outcome:
    """Errors in words, the operators' counters, the number of cases, and how many of them MXNet
    itself does not compute."""

    wrong: list = field(default_factory=list)
    counts: dict = field(default_factory=lambda: collections.defaultdict(Counts))
    cases: int = 0
    refused: int = 0

    def add(self, other):
        self.wrong += other.wrong
        self.cases += other.cases
        self.refused += other.refused
        for kind, each in other.counts.items():
            mine = self.counts[kind]
            mine.drawn, mine.gpu = mine.drawn + each.drawn, mine.gpu + each.gpu
            mine.left += each.left

    def count(self, case):
        left = case.left()
        for name, kind in case.chain.kinds.items():
            counts = self.counts[kind]
            counts.drawn += 1
            counts.left += name in left
            counts.gpu += name not in left


class _Everything:
    """The set of all operators, as those worth copies to a GPU."""

    def __contains__(self, name):
        return True


@contextlib.contextmanager
def emulating(machine):
    """Run even small networks on this machine's emulated GPU."""
    with (
        settings.override(backend="emulator"),
        mock.patch.object(emulated, "emulated", return_value=machine),
        mock.patch.object(partition, "_WORTH_COPIES", _Everything()),
    ):
        yield


def run(seed, numbers, mode="fast"):
    """Run cases by number; return the outcome."""
    outcome = Outcome()
    for first in range(0, len(numbers), TOGETHER):
        _run_together(seed, numbers[first : first + TOGETHER], mode, outcome)
    return outcome


def _run_together(seed, numbers, mode, outcome):
    mx, machine, cases = load_mxnet(), MachineOfMany(mode), []

    def tried(case, work):
        try:
            return work()
        except Exception as error:
            outcome.wrong.append(f"seed {seed}, {case}: {type(error).__name__}: {str(error)[:300]}")
        return False

    with emulating(machine):
        for number in numbers:
            case = Case(mx, seed, number)
            before = len(outcome.wrong)
            if tried(case, case.rehearse):
                cases.append(case)
            elif len(outcome.wrong) == before:
                outcome.refused += 1
        machine.compile()
        for case in cases:
            reason = tried(case, case.wrong)
            if reason:
                outcome.wrong.append(f"seed {seed}, {case}: {reason}")
            outcome.count(case)
    outcome.cases += len(numbers)


def run_beside(seed, count, jobs, mode, progress):
    """Run the first `count` cases of a seed in several processes; return the outcome."""
    outcome = Outcome()

    def work(worker, part):
        try:
            return worker(run, seed, part, mode)
        except programs.Died as error:
            return Outcome([str(error)], cases=len(part))

    parts = [range(at, min(count, at + TOGETHER)) for at in range(0, count, TOGETHER)]
    for _, found in programs.shared_out(work, parts, jobs):
        outcome.add(found)
        progress(outcome, found.wrong)
    return outcome


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run one, by its number")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--mode", default="fast", choices=settings.EMULATIONS)
    parser.add_argument("--output", type=Path, help="write PREFIX.md and PREFIX.json")
    asked = parser.parse_args()
    start = time.monotonic()

    def progress(outcome, wrong):
        seconds = f"{time.monotonic() - start:.0f} s"
        line = f"{outcome.cases} cases, {len(outcome.wrong)} wrong, {seconds}"
        print(*wrong, line, sep="\n", file=sys.stderr, flush=True)

    os.environ["MXNET_SUBGRAPH_VERBOSE"] = "0"
    if asked.case is not None:
        outcome = run(asked.seed, [asked.case], asked.mode)
        progress(outcome, outcome.wrong)
    else:
        outcome = run_beside(asked.seed, asked.cases, asked.jobs, asked.mode, progress)
    show(outcome, asked, time.monotonic() - start)
    return 1 if outcome.wrong else 0


def show(outcome, asked, seconds):
    """Print the outcome, and write it if requested."""
    rows = [
        (kind, each.drawn, each.gpu, each.left) for kind, each in sorted(outcome.counts.items())
    ]
    text = table(("operator", "drawn", "on the GPU", "left to MXNet"), rows, right=(1, 2, 3))
    text += (
        f"\n\n{outcome.cases} random chains of seed {asked.seed}, {len(outcome.wrong)} of them "
        f"wrong, {outcome.refused} that MXNet itself does not compute."
    )
    print(text)
    if asked.output is not None:
        from ece408_op.bench import results

        content = {
            "seed": asked.seed,
            "cases": outcome.cases,
            "refused": outcome.refused,
            "seconds": round(seconds, 1),
            "wrong": outcome.wrong,
            "operators": {kind: asdict(each) for kind, each in sorted(outcome.counts.items())},
        }
        title = "Random chains of operators on the emulated GPU, compared with MXNet's results"
        results.write(asked.output, title, text, content)


if __name__ == "__main__":
    sys.exit(main())
