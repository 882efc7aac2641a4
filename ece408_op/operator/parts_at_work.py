"""`ece408_part`: parts of a graph, each of which MXNet runs as one node.

kernels/mxnet/part_operator.cpp is called by MXNet, and calls the functions here: for the program of
each new set of shapes, for op times and errors, and for each call of a part that the GPU computes.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .. import errors, settings
from ..backends import kernel_file
from ..backends.cpu import native, program
from ..backends.cpu.cpu_backend import chosen_isa
from ..errors import Ece408Error
from . import compiled_operator, native_handles
from .array_memory import pointer
from .loading import load_mxnet
from .native_handles import library as _library
from .networks import DATA, FOR_ALL_IMAGES, PARAMETER, TYPES, OnGpu

if TYPE_CHECKING:
    from ..network import Array, KeptCode, Steps
    from ..network.gpu_training import Given, GpuTrainingProgram, Saved
    from ..network.training import TrainingProgram

NAME = "ece408_part"
# A call that takes more memory takes so long that its caller may want to continue meanwhile.
MOST_BYTES = 32 << 20
# A status of the header's.
_PREDICTS = -1
# An answer of `ece408_part_call`.
_PYTHON_COMPUTES = 2

_SIZES = ctypes.POINTER(ctypes.c_int64)
_Make = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, _SIZES, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
)
_Report = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_double)),
    *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
)
_Compute = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64),
    *(ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)),
)
_End = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64)


class _Code(ctypes.Structure):
    """The header's `ece408_code`."""

    _fields_ = [
        ("steps", ctypes.c_void_p),
        *[(name, _SIZES) for name in ("outputs", "kept", "weights")],
        *[(name, ctypes.c_int64) for name in ("number", "step_count", "output_count")],
        *[(name, ctypes.c_int64) for name in ("kept_count", "weight_count", "bytes", "isa")],
        *[(name, ctypes.c_int64) for name in ("forward_steps", "saved_bytes")],
    ]


def _give(
    target: ctypes.c_void_p,
    number: int,
    steps: Any = None,
    shapes: Iterable[Sequence[int]] = (),
    kept: Iterable[KeptCode] = (),
    weights: Sequence[int] = (),
    forward_steps: int | None = None,
    isa: str | None = None,
    **others: int,
) -> bool:
    """Give the library code for a program; return whether it has taken it. `shapes` are those of a
    program's outputs."""
    outputs = [size for shape in shapes for size in (len(shape), *shape)]
    lists = outputs, [each.number for each in kept], weights
    made = _Code(
        *(ctypes.cast(steps, ctypes.c_void_p), *map(_integers, lists)),
        *(number, len(steps or ()), *map(len, lists)),
        isa=native.ISA_CODES[isa] if isa else 0,
        forward_steps=len(steps or ()) if forward_steps is None else forward_steps,
        **others,
    )
    return bool(_library().ece408_part_take(target, ctypes.byref(made)))


_numbers = itertools.count(1)
_opened: dict[int, _Opened | _Trained] = {}
_refusals: dict[int, Ece408Error] = {}
# By their numbers: steps of programs, or their arrays without addresses if Python computes; and the
# part of what is kept.
_programs: dict[int, Steps] = {}
_arrays_of: dict[int, list[Array]] = {}
_keepers: dict[int, _Opened] = {}
# Recorded calls on a GPU, by number.
_recorded: dict[int, tuple[GpuTrainingProgram, Saved]] = {}


def install() -> None:
    """Register this module's functions with the operator, if MXNet has loaded it."""
    if compiled_operator.missing() is None:
        functions = load_mxnet().base._LIB
        _library().ece408_part_use(ctypes.byref(_FUNCTIONS), _of_mxnet(functions))
        functions.MXAutogradBackwardEx = _predicting(functions)
        for name in ("MXRandomSeed", "MXRandomSeedContext"):
            setattr(functions, name, _seeding(getattr(functions, name)))


class _Seeds:
    """The seeds of calls that draw random numbers on a GPU, by MXNet's seed, the device of their
    context, and their order there."""

    def __init__(self, seed: int) -> None:
        self._seed, self._calls = seed & 0xFFFFFFFF, dict[int, Iterator[int]]()

    def next(self, device: int) -> int:
        calls = self._calls.setdefault(device, itertools.count(device << 24))
        return next(calls) << 32 | self._seed


_seeds = _Seeds(0)


def _seeding(method: Any) -> Any:
    """Return a function of MXNet's that takes a seed first, so that our numbers have it, too."""

    @functools.wraps(method, assigned=())
    def seeded(seed: Any, *others: Any) -> Any:
        global _seeds
        _seeds = _Seeds(getattr(seed, "value", seed))
        return method(seed, *others)

    return seeded


def _predicting(functions: Any) -> Any:
    """Return MXNet's `MXAutogradBackwardEx` that tells parts of `backward(train_mode=False)`."""
    backward = functions.MXAutogradBackwardEx

    @functools.wraps(backward, assigned=())
    def computed(*arguments: Any) -> int:
        train_mode = arguments[7]
        if getattr(train_mode, "value", train_mode):
            return int(backward(*arguments))
        _library().ece408_part_predict(1)
        try:
            # Parts run later, on MXNet's threads.
            with errors.surfaced():
                return int(backward(*arguments) or functions.MXNDArrayWaitAll())
        finally:
            _library().ece408_part_predict(0)

    return computed


def mode() -> str:
    """Return the precision of parts under the settings; "" if there are none, because each
    convolution is for another backend, or for a file. Raises `InvalidSetting`."""
    kernel = settings.kernel()
    by_file = kernel is not None and kernel_file.device_of(kernel) is not None
    return settings.precision() if settings.backend() in (None, "cpu") and not by_file else ""


class Parts:
    """The parts of one graph, as long as this object lives.

    Its creator must keep the arrays of the last calls alive: MXNet could reuse their memory for
    others, which would be mistaken for them.
    """

    numbers: Sequence[int] = ()  # also defined if an interrupt prevents construction

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Calls of at most `most_bytes` of memory can be direct (see `DirectCalls`); if 0, none."""
        self._release = _library().ece408_part_release  # names may be gone when this is deleted
        self.numbers = []
        self.most_bytes = most_bytes
        # The names of inputs that are parameters of a part.
        self.parameters: dict[str, None] = {}
        # The names of the inputs in order, if the graph is one part and nothing else.
        self.whole: list[str] | None = None
        # Of nodes that train, the inputs that have gradients of 0, by the part's number.
        self.fixed: dict[str, list[int]] = {}
        # Whether data may be of uint8.
        self.takes_pixels = False
        self.train_on_gpu = False

    def node(
        self,
        graph: Mapping[str, Any],
        kinds: str,
        types: Sequence[str],
        name: str,
        on: str = "cpu",
        unread: str = "",
    ) -> dict[str, Any]:
        """Open a part and return its node, without inputs. `kinds` has the kind of each input (see
        `networks`), `types` are those of its inputs and outputs, and `unread` marks the outputs
        that a GPU need not compute. Raises what `Network` does."""
        opened = _Opened(graph, kinds, types, on, unread)
        self.parameters.update(dict.fromkeys(opened.parameters))
        return self._node(opened, kinds, types, name)

    def training_node(
        self,
        graph: Mapping[str, Any],
        wanted: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        name: str,
        on: str,
        device: int,
    ) -> dict[str, Any]:
        """Open a part that trains, of float32, and return its node, without inputs. `wanted` are
        its inputs whose gradients are computed, and `shapes` those of all; they are on MXNet's
        `cpu(device)`. Raises what `Training` does."""
        opened = _Trained(graph, wanted, shapes, on, device)
        self.train_on_gpu = opened.in_python
        kinds = DATA * len(shapes)
        types = ["float32"] * (len(shapes) + len(graph["heads"]))
        node = self._node(opened, kinds, types, name)
        uses = opened.uses()
        both = ((ctypes.c_int * len(uses))(*(use[k] for use in uses)) for k in (0, 1))
        _library().ece408_part_train(self.numbers[-1], *both, len(uses))
        self.fixed[node["attrs"]["part"]] = [place for place, use in uses if use == _SET_TO_1]
        return node

    def _node(
        self, opened: _Opened | _Trained, kinds: str, types: Sequence[str], name: str
    ) -> dict[str, Any]:
        number = next(_numbers)
        _opened[number] = opened
        codes = (ctypes.c_int * len(types))(*map(TYPES.index, types))
        _library().ece408_part_open(
            *(number, kinds.encode(), codes, len(types), int(opened.in_python))
        )
        self.numbers = [*self.numbers, number]
        counts = [len(kinds), len(types) - len(kinds)]
        counts += [place for place, use in opened.uses() if use == _AVERAGE]
        attributes = {"key": compiled_operator.KEY, "part": str(number)}
        attributes["counts"] = " ".join(map(str, counts))
        return {"op": NAME, "name": name, "attrs": attributes}

    def forget(self, arrays: Mapping[str, Any]) -> None:
        """Forget the parameters of the last calls; the next ones have these arrays, by name. No
        call may be in progress."""
        foreign = {name for name, array in arrays.items() if native_handles.is_foreign(array)}
        for number in self.numbers:
            kinds = _opened[number].kinds(foreign)
            _library().ece408_part_forget(number, kinds.encode())

    def taken_refusal(self) -> Ece408Error | None:
        """Return why no program could be made for a node whose shapes MXNet inferred, once."""
        refusals = [_refusals.pop(number, None) for number in self.numbers]
        return next(filter(None, refusals), None)

    def __del__(self) -> None:
        for number in self.numbers:
            self._release(number)


class DirectCalls:
    """Calls of a graph that is one part, on the caller's thread. MXNet's CachedOp takes a
    microsecond for each array of a call, and its engine wakes a thread that then wakes the caller:
    for mobilenetv2_1.0, 0.3 ms in all. Results are of MXNet's NumPy interface if `is_np`."""

    def __init__(self, parts: Parts, names: Sequence[str], is_np: bool) -> None:
        assert parts.whole is not None
        self._part, self._most_bytes = parts.numbers[0], parts.most_bytes
        # The positions of the part's inputs in a call, and those that change with each.
        self._order = [names.index(name) for name in parts.whole]
        self._data = [
            (place, names.index(name))
            for place, name in enumerate(parts.whole)
            if name not in parts.parameters
        ]
        self._opened = _opened[self._part]
        self._array = "_np_ndarray_cls" if is_np else "_ndarray_cls"
        self._handles: Any = None
        self._function = _library().ece408_part_call

    def hold(self, given: Sequence[Any]) -> None:
        """Take the parameters of the next calls, which the caller keeps alive."""
        handles = (given[number].handle for number in self._order)
        self._handles = (ctypes.c_void_p * len(self._order))(*handles)

    def __call__(self, given: Sequence[Any]) -> list[Any] | None:
        """Return the results, or `None` if a call cannot be direct. Raises `MXNetError` if an input
        could not be computed, and the errors of computing on a GPU."""
        from mxnet import _global_var
        from mxnet.base import NDArrayHandle, check_call

        # A copy: other threads may call at the same time.
        handles = type(self._handles).from_buffer_copy(self._handles)
        for place, number in self._data:
            handles[place] = given[number].handle
        results = (ctypes.c_void_p * self._opened.outputs)()
        limit, version = ctypes.c_int64(self._most_bytes), ctypes.c_uint64()
        status = self._function(self._part, handles, results, limit, ctypes.byref(version))
        array = getattr(_global_var, self._array)
        arrays = [array(NDArrayHandle(each)) for each in results if each is not None]
        check_call(min(status, 0))
        if status == _PYTHON_COMPUTES:
            on_gpu = self._opened.on_gpu
            assert on_gpu is not None
            data = (_described(given[number]) for _, number in self._data)
            outputs = list(map(_described, arrays))
            return arrays if on_gpu.compute_again(version.value, data, outputs) else None
        return arrays if status else None


class _Functions(ctypes.Structure):
    """The header's `ece408_part_functions`."""

    _fields_ = [("make", _Make), ("report", _Report), ("compute", _Compute), ("end", _End)]


def _of_mxnet(functions: Any) -> Any:
    """Return the header's `ece408_mxnet`."""
    names = (
        *("MXNDArrayWaitToRead", "MXNDArrayGetData", "MXNDArrayCreateEx"),
        "MXEnginePushSyncND",
    )
    addresses = (ctypes.cast(getattr(functions, name), ctypes.c_void_p) for name in names)
    return (ctypes.c_void_p * len(names))(*addresses)


class _Opened:
    """A part's network, on the CPU or `on_gpu`."""

    def __init__(
        self,
        graph: Mapping[str, Any],
        kinds: str,
        types: Sequence[str],
        on: str,
        unread: str,
    ) -> None:
        from ..network import Network

        self.outputs = len(types) - len(kinds)
        self._names = [node["name"] for node in graph["nodes"] if node["op"] == "null"]
        self._kinds, self._types = kinds, types
        # What the library keeps for programs, by number.
        self.kept: dict[int, KeptCode] = {}
        self.parameters = [name for name, kind in zip(self._names, kinds) if kind == PARAMETER]
        constant = {name for name, kind in zip(self._names, kinds) if kind != DATA}
        whole = self._network = Network(json.dumps(graph), self._names, constant, on=on)
        self.on_gpu = OnGpu(whole, graph, self._names, kinds, unread) if on == "gpu" else None
        self.in_python = on == "gpu"

    def kinds(self, foreign: set[str]) -> str:
        """Return the kinds of its inputs if parameters of these names are in memory that MXNet does
        not own."""
        return "".join(
            FOR_ALL_IMAGES if kind == PARAMETER and name in foreign else kind
            for name, kind in zip(self._names, self._kinds)
        )

    def uses(self) -> list[tuple[int, int]]:
        return []

    def make(self, sizes: Sequence[int], target: ctypes.c_void_p) -> None:
        """Give the library the program for inputs of these types and shapes; of the outputs' shapes
        alone for a GPU."""
        from ..network import Array

        inputs = list(_arrays(sizes))
        # Numbers of what is kept are not negative.
        number = -next(_numbers)
        if self.on_gpu is not None:
            shapes = self._network.output_shapes(inputs)
            typed = zip(shapes, self._types[len(inputs) :])
            _arrays_of[number] = [*inputs, *(Array(0, *each, 0) for each in typed)]
            _give(target, number, shapes=shapes)
            return
        settled = settings.precision(), chosen_isa()
        kept = [each for each in self.kept.values() if each.settings == settled]
        code = self._network.code(inputs, self._types[len(inputs) :], kept)
        new = [each for each in code.kept if each.number not in self.kept]
        shapes = [value.shape for value in code.steps.outputs]
        if not all(self._keep(each, target) for each in new) or not _give(
            *(target, number, code.for_images, shapes, code.kept, code.reads),
            isa=code.isa,
            bytes=code.arena_bytes,
        ):
            raise errors.NotEnoughMemory(
                f"a network keeps {sum(each.nbytes for each in code.kept)} bytes of its weights, "
                "and there is no room"
            )
        _programs[number] = code.steps

    def _keep(self, kept: KeptCode, target: ctypes.c_void_p) -> bool:
        self.kept[kept.number] = kept
        _keepers[kept.number] = self
        return _give(
            *(target, kept.number, kept.steps, (), kept.before, kept.packed),
            isa=kept.settings[1],
            bytes=kept.nbytes,
        )


def _described(array: Any) -> Array:
    from ..network import Array

    # The version of data is not read.
    return Array(pointer(array), array.shape, np.dtype(array.dtype).name, 0)


# The header's uses of inputs.
_WANTED, _AVERAGE, _SET_TO_1 = range(3)


class _Trained:
    """A part's network with gradients, on the CPU, or on a GPU if it is `in_python`."""

    on_gpu: OnGpu | None = None

    def __init__(
        self,
        graph: Mapping[str, Any],
        wanted: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        on: str,
        device: int,
    ) -> None:
        from ..network import Array
        from ..network.training import Training

        self.outputs, self.in_python = len(graph["heads"]), on == "gpu"
        self._names = [node["name"] for node in graph["nodes"] if node["op"] == "null"]
        self._wanted, self.inputs, self._device = wanted, len(self._names), device
        self._training = Training(json.dumps(graph), self._names, wanted, on=on, device=device)
        # Not every layer's gradient is computed for every shape.
        self._training.program([Array(0, shape, "float32", 0) for shape in shapes])
        self._averages = [self._names.index(name) for name in self._training.averages]

    def uses(self) -> list[tuple[int, int]]:
        """Return inputs and their uses."""
        each = (
            *((name, _WANTED) for name in self._wanted),
            *((name, _AVERAGE) for name in self._training.averages),
            *((name, _SET_TO_1) for name in self._training.fixed),
        )
        return [(self._names.index(name), use) for name, use in each]

    def kinds(self, foreign: set[str]) -> str:
        return DATA * len(self._names)

    def make(self, sizes: Sequence[int], target: ctypes.c_void_p) -> None:
        """Give the library the program for inputs of these types and shapes; of the outputs' shapes
        alone for a GPU."""
        from ..network import Array

        inputs = list(_arrays(sizes))
        code, number = self._training.program(inputs), -next(_numbers)
        if self.in_python:
            shapes = *code.output_shapes, *code.result_shapes
            _arrays_of[number] = [*inputs, *(Array(0, each, "float32", 0) for each in shapes)]
            _give(target, number, shapes=code.output_shapes)
            return
        code = cast("TrainingProgram", code)
        _give(
            *(target, number, code.for_images, code.output_shapes),
            isa=code.isa,
            bytes=code.arena_bytes,
            forward_steps=code.steps.forward or 0,
            saved_bytes=code.saved_bytes,
        )
        _programs[number] = code.steps

    def compute(
        self,
        call: int,
        is_backward: bool,
        versions: Any,
        addresses: Any,
        arrays: Sequence[Array],
    ) -> None:
        """Compute a pass of a recorded call on a GPU; `arrays` have types and shapes."""
        from ..network.gpu_training import Given

        count = len(arrays) if is_backward else self.inputs + self.outputs
        given = Given(addresses[:count], versions[:count])
        self._count_writes(given)
        if is_backward:
            self._backward(call, given)
        else:
            self._forward(call, arrays[: self.inputs], given)

    def _forward(self, call: int, inputs: Sequence[Array], given: Given) -> None:
        made = cast("GpuTrainingProgram", self._training.program(inputs))
        known, saved = _recorded.get(call, (None, None))
        if saved is None or known is not made:
            saved = made.room()
        _recorded[call] = made, saved
        self._publish(made, made.forward(given, saved, _seeds.next(self._device)), 0)

    def _backward(self, call: int, given: Given) -> None:
        made, saved = _recorded[call]
        self._publish(made, made.backward(given, saved), made.steps.forward or 0)

    def _count_writes(self, given: Given) -> None:
        """Give the averages the versions that they have from now on: MXNet counts each pass as a
        write to them, also one that fails."""
        from ..network import residents

        for place in self._averages:
            given.versions[place] += 1
            residents.count_write(given.addresses[place], given.versions[place])

    def _publish(self, made: GpuTrainingProgram, seconds: list[float] | None, first: int) -> None:
        from .. import network

        if seconds is not None:
            network.publish(made.steps.for_images[first:], seconds, "gpu")


def _integers(numbers: Iterable[int]) -> Any:
    found = list(numbers)
    return (ctypes.c_int64 * len(found))(*found)


def _arrays(sizes: Sequence[int]) -> Iterator[Array]:
    from ..network import Array

    at = 0
    while at < len(sizes):
        kind, dimensions = sizes[at : at + 2]
        at += 2 + dimensions
        yield Array(0, tuple(sizes[at - dimensions : at]), TYPES[kind], 0)


def _make(part: int, sizes: Any, count: int, target: int, is_call: int) -> int:
    def work() -> None:
        _opened[part].make(sizes[:count], ctypes.c_void_p(target))

    if is_call:
        return errors.remembered(work)
    try:
        work()
    except Ece408Error as error:
        # The operator in Python computes then, and reports the error, or `to_cpu` does.
        _refusals[part] = error.with_traceback(None)
        return 0
    return 1


def _report(
    number: int, seconds: Any, first: int, count: int, status: int, step: int, kind: int
) -> int:
    def work() -> None:
        if status == _PREDICTS:
            raise errors.UnsupportedProblem(
                "a call that was recorded in training has no gradients of prediction "
                "(train_mode=False) where a normalisation moves averages; record it with "
                "train_mode=False"
            )
        if status:
            raise program.failure(status, step, kind)
        network.publish(_programs[number].for_images[first:], seconds[:count])

    from .. import network

    return errors.remembered(work)


def _compute(
    part: int, number: int, call: int, backward: int, version: int, versions: Any, addresses: Any
) -> int:
    def work() -> None:
        opened, arrays = _opened[part], _arrays_of[number]
        if isinstance(opened, _Trained):
            opened.compute(call, bool(backward), versions, addresses, arrays)
        else:
            assert opened.on_gpu is not None
            opened.on_gpu.compute(version, versions, addresses, arrays)

    return errors.remembered(work)


def _end(what: int, number: int) -> int:
    return errors.remembered(lambda: _ENDS[what](number))


def _end_part(number: int) -> None:
    _refusals.pop(number, None)
    opened = _opened.pop(number)
    if opened.on_gpu is not None:
        opened.on_gpu.retire()


def _end_code(number: int) -> None:
    _programs.pop(number, None)
    _arrays_of.pop(number, None)
    keeper = _keepers.pop(number, None)
    if keeper is not None:
        del keeper.kept[number]


# In the order of the header's `ece408_ended`.
_ENDS = (_end_part, _end_code, lambda call: _recorded.pop(call, None))
_FUNCTIONS = _Functions(_Make(_make), _Report(_report), _Compute(_compute), _End(_end))
