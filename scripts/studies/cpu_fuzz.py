"""Random problems for the CPU kernels, compared with the oracle: exact on whole numbers.

Every kernel that accepts a problem computes it, even if it is not the default for it, forward
passes also with prepacked weights. Arrays end at forbidden memory, and outputs hold NaN initially.
Some problems have infinities and NaN among their inputs, which must appear where the textbook loop
puts them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from studies import guarded

from ece408_op.backends.cpu import native
from ece408_op.bench import oracle
from ece408_op.errors import Ece408Error, InvalidProblem, InvalidSetting, UnsupportedProblem
from ece408_op.files import markdown
from ece408_op.problem import ITEM_BYTES, ConvProblem

# Output and inputs by direction, in the order of kernels/cpu/api/ece408.h.
_ARRAYS = {
    "forward": ("y", "x", "w", "bias"),
    "backward_data": ("x", "w", "y"),
    "backward_weight": ("w", "x", "y"),
}
# Variants of float32 kernels; the same functions compute other dtypes.
_STRICT, _PACKED = "strict", "packed"
# A status code of kernels/cpu/api/ece408.h.
_UNSUPPORTED = 2
# Largest number of multiply-adds, so that the oracle takes milliseconds.
_MOST_PRODUCTS = 200_000
# Kernels with a Winograd transform of row pairs are exact while a sum's products times the largest
# inputs stay below this.
_EXACT = 1 << 18


@dataclass(frozen=True)
class Case:
    """A problem and how to compute it. Its one-line form (`str`, `parse`) reproduces it.

    `side` is the end at which arrays touch forbidden memory; with `special` the inputs contain
    infinities and NaN.
    """

    problem: ConvProblem
    isa: str
    threads: int
    side: str
    accumulate: bool
    special: bool
    seed: int

    def __str__(self) -> str:
        flags = [name for name in ("accumulate", "special") if getattr(self, name)]
        words = [self.problem, self.isa, f"threads={self.threads}", self.side, *flags]
        return " ".join(str(word) for word in [*words, f"seed={self.seed}"])

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case that `str` wrote as `text`. Raises `InvalidProblem`, `InvalidSetting`."""
        words = text.split()
        numbers = dict(word.split("=", 1) for word in words if "=" in word)
        try:
            return cls(
                ConvProblem.parse(words[0]),
                next(word for word in words if word in native.ISA_CODES),
                int(numbers["threads"]),
                next(word for word in words if word in ("start", "end")),
                "accumulate" in words,
                "special" in words,
                int(numbers["seed"]),
            )
        except (IndexError, KeyError, StopIteration, ValueError):
            form = "b1,c1,h5,w5,m1,k3x3 avx2 threads=2 end [accumulate] [special] seed=1"
            raise InvalidSetting(f"cannot read {text!r}; a case looks like {form}") from None


def cases(count: int, seed: int) -> Iterator[Case]:
    """Return `count` random cases, reproducible for a seed and instruction sets."""
    isas = native.isas()
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        yield Case(
            _random_problem(rng),
            isas[rng.integers(len(isas))],
            int(rng.integers(1, 6)),
            ("start", "end")[rng.integers(2)],
            bool(rng.integers(2)),
            rng.random() < 0.25,
            int(rng.integers(1 << 16)),
        )


def run(case: Case) -> tuple[Counter[tuple[str, str]], list[tuple[str, str, str]]]:
    """Run the case; return how often each kernel computed each direction, and the errors: (kernel,
    direction, how).

    Raises `InvalidSetting` for an instruction set that this CPU lacks.
    """
    if case.isa not in native.isas():
        raise InvalidSetting(f"this CPU has no {case.isa}; it has {', '.join(native.isas())}")
    arrays = _inputs(case)
    ran: Counter[tuple[str, str]] = Counter()
    failures = []
    for direction in _ARRAYS:
        expected = _expected(case, direction, arrays)
        for form in _forms(case, direction):
            chosen = native.choose(case.problem, direction, case.isa, form == _STRICT)
            for kernel in native.kernels():
                try:
                    wrong = _wrong(case, kernel, direction, arrays, expected, form)
                except UnsupportedProblem as error:
                    if kernel != chosen or form == _PACKED:
                        continue
                    wrong = str(error)
                except Ece408Error as error:
                    wrong = str(error)
                name = f"{kernel}, {form}" if form else kernel
                ran[name, direction] += 1
                if wrong is not None:
                    failures.append((name, direction, wrong))
    return ran, failures


def _forms(case: Case, direction: str) -> tuple[str, ...]:
    if case.problem.dtype != "float32":
        return ("",)
    packs = direction == "forward" and not case.accumulate
    return ("", _STRICT, _PACKED) if packs else ("", _STRICT)


def _random_problem(rng: np.random.Generator) -> ConvProblem:
    while True:
        try:
            problem = _KINDS[rng.integers(len(_KINDS))](rng)
        except InvalidProblem:
            continue
        while problem.flops > 2 * _MOST_PRODUCTS and problem.batch > 1:
            problem = dataclasses.replace(problem, batch=problem.batch // 2)
        if problem.flops <= 2 * _MOST_PRODUCTS and math.prod(problem.x_shape) <= _MOST_PRODUCTS:
            return problem


def _some(rng: np.random.Generator, most: int) -> int:
    """Return a random number from 1 to `most`, small numbers more often."""
    return int(math.exp(rng.uniform(0, math.log(most + 1))))


def _pair(rng: np.random.Generator, most: int) -> tuple[int, int]:
    return _some(rng, most), _some(rng, most)


def _plain(rng: np.random.Generator, groups: int = 1) -> dict[str, object]:
    return {
        "batch": _some(rng, 40),
        "channels": groups * _some(rng, 70),
        "height": _some(rng, 40),
        "width": _some(rng, 70),
        "filters": groups * _some(rng, 70),
        "kernel": _pair(rng, 9),
        "groups": groups,
        "bias": bool(rng.integers(2)),
        "dtype": sorted(ITEM_BYTES)[rng.integers(3)],
    }


def _any(rng: np.random.Generator) -> ConvProblem:
    fields = _plain(rng, _some(rng, 6))
    pad = (_some(rng, 9) - 1, _some(rng, 9) - 1)
    return ConvProblem(**fields, stride=_pair(rng, 9), pad=pad, dilate=_pair(rng, 5))  # type: ignore[arg-type]


def _unit_steps(rng: np.random.Generator) -> ConvProblem:
    """Return a problem that `direct` and `winograd` support."""
    fields = {**_plain(rng), "dtype": "float32"}
    if rng.integers(2):
        fields["kernel"] = tuple(int(side) for side in rng.choice((3, 5, 7), 2))
    return ConvProblem(**fields, pad=(_some(rng, 5) - 1, _some(rng, 5) - 1))  # type: ignore[arg-type]


def _depthwise(rng: np.random.Generator) -> ConvProblem:
    channels, side = _some(rng, 20), int(rng.choice((3, 5)))
    fields = {**_plain(rng), "channels": channels, "groups": channels, "dtype": "float32"}
    fields["filters"] = channels * int(rng.choice((1, 1, 2, 3)))
    dilate = _pair(rng, 3) if rng.integers(2) else (1, 1)
    stride = 1 + int(rng.integers(2))
    pad = (_some(rng, 7) - 1, _some(rng, 7) - 1)
    fields["kernel"] = (side, side)
    return ConvProblem(**fields, stride=(stride, stride), pad=pad, dilate=dilate)  # type: ignore[arg-type]


def _row_pairs(rng: np.random.Generator) -> ConvProblem:
    """Return a problem with enough channels, filters and pixels for the Winograd gradient for w."""
    fields = {**_plain(rng), "channels": 7 + _some(rng, 3), "filters": 7 + _some(rng, 3)}
    height, width = 2 + _some(rng, 40), 2 + _some(rng, 40)
    fields |= {"height": height, "width": width, "kernel": (3, _some(rng, 3))}
    fields["batch"] = 1 + 600 // (height * width)
    pad = (_some(rng, 4) - 1, _some(rng, 4) - 1)
    return ConvProblem(**fields, pad=pad, dilate=(1, _some(rng, 3)))  # type: ignore[arg-type]


def _few_windows(rng: np.random.Generator) -> ConvProblem:
    """Return a problem with a kernel nearly as large as the padded image, or strides beyond it."""
    fields, pad = _plain(rng, _some(rng, 3)), (_some(rng, 3) - 1, _some(rng, 3) - 1)
    height, width = _pair(rng, 30)
    fields |= {"height": height, "width": width}
    fields["kernel"] = (
        max(1, height + 2 * pad[0] - _some(rng, 4) + 1),
        max(1, width + 2 * pad[1] - _some(rng, 4) + 1),
    )
    stride = _pair(rng, 10**6) if rng.integers(2) else _pair(rng, 3)
    return ConvProblem(**fields, stride=stride, pad=pad)  # type: ignore[arg-type]


def _apart(rng: np.random.Generator) -> ConvProblem:
    """Return a problem with disjoint windows, for im2col."""
    fields = _plain(rng, _some(rng, 3))
    kernel = _pair(rng, 20)
    fields |= {"kernel": kernel, "height": _some(rng, 80), "width": _some(rng, 80)}
    stride = (kernel[0] + _some(rng, 4) - 1, kernel[1] + _some(rng, 4) - 1)
    return ConvProblem(**fields, stride=stride)  # type: ignore[arg-type]


def _line(rng: np.random.Generator) -> ConvProblem:
    """Return a one-dimensional problem with a long kernel."""
    fields = {**_plain(rng), "height": 1, "width": _some(rng, 2000)}
    fields["kernel"] = (1, _some(rng, 400))
    stride, pad = (1, _some(rng, 200)), (0, _some(rng, 20) - 1)
    return ConvProblem(**fields, stride=stride, pad=pad, dilate=(1, _some(rng, 4)))  # type: ignore[arg-type]


def _pixels(rng: np.random.Generator) -> ConvProblem:
    """Return a problem with single-pixel planes or 1x1 kernels."""
    fields = _plain(rng, _some(rng, 3))
    if rng.integers(2):
        fields |= {"height": 1, "width": 1, "kernel": (1 + 2 * int(rng.integers(3)),) * 2}
        pad = tuple(side // 2 for side in fields["kernel"])  # type: ignore[attr-defined]
        return ConvProblem(**fields, pad=pad)  # type: ignore[arg-type]
    return ConvProblem(**{**fields, "kernel": (1, 1)}, stride=_pair(rng, 4))  # type: ignore[arg-type]


_KINDS: tuple[Callable[[np.random.Generator], ConvProblem], ...] = (
    *(_any, _any, _unit_steps, _unit_steps, _depthwise, _row_pairs),
    *(_few_windows, _apart, _line, _pixels),
)


def _inputs(case: Case) -> dict[str, np.ndarray]:
    """Return arrays by role: x, w, y (its gradient), optional bias; in float64."""
    problem = case.problem
    rng = np.random.default_rng(case.seed)
    terms = max(math.prod(problem.w_shape[1:]), problem.filters * math.prod(problem.kernel))
    most = max(1, min(8, math.isqrt(_EXACT // (2 * terms))))
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape}
    if problem.bias:
        shapes["bias"] = problem.bias_shape
    arrays = {
        name: rng.integers(-most, most + 1, shape).astype(np.float64)
        for name, shape in shapes.items()
    }
    if case.special:
        for array in arrays.values():
            flat = array.reshape(-1)
            places = rng.integers(flat.size, size=rng.integers(0, 4))
            flat[places] = rng.choice([np.inf, -np.inf, np.nan], len(places))
    return arrays


def _onto(case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """Return the output's initial contents."""
    if not case.accumulate:
        return np.full(shape, np.nan)
    return np.random.default_rng(case.seed + 1).integers(-8, 9, shape).astype(np.float64)


def _expected(case: Case, direction: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    output, *inputs = _ARRAYS[direction]
    compute = getattr(oracle, direction)
    out = compute(case.problem, *(arrays[name] for name in inputs if name in arrays))
    if case.accumulate:
        out += _onto(case, arrays[output].shape)
    with np.errstate(over="ignore"):
        return out.astype(case.problem.dtype)


def _wrong(
    case: Case,
    kernel: str,
    direction: str,
    arrays: dict[str, np.ndarray],
    expected: np.ndarray,
    form: str,
) -> str | None:
    """Return the error in a kernel's result, or `None`."""
    dtype, (_, *roles) = case.problem.dtype, _ARRAYS[direction]
    inputs = [
        guarded.place(arrays[role].astype(dtype), case.side, read_only=True)
        if role in arrays
        else None
        for role in roles
    ]
    out = guarded.place(_onto(case, expected.shape).astype(dtype), case.side)
    addresses = [None if array is None else array.ctypes.data for array in (*inputs, out)]
    if form == _PACKED:
        _run_packed(case, kernel, *addresses)
    else:
        native.run(
            direction,
            case.problem,
            *addresses,
            accumulate=case.accumulate,
            threads=case.threads,
            isa=case.isa,
            kernel=kernel,
            strict=form == _STRICT,
        )
    if not guarded.canary_intact(out, case.side):
        return "memory beside the output was written"
    same = (out == expected) | (np.isnan(out) & np.isnan(expected))
    if same.all():
        return None
    first = tuple(int(i) for i in np.argwhere(~same)[0])
    return (
        f"{np.count_nonzero(~same)} of {out.size} elements are wrong; the first, {first}, is "
        f"{out[first]} instead of {expected[first]}"
    )


def _run_packed(case: Case, kernel: str, *addresses: int | None) -> None:
    """Run the forward pass on x, w, bias and y, with packed weights if the kernel supports them."""
    library, problem = native.library(), ctypes.byref(native.as_struct(case.problem))
    code, number = native.ISA_CODES[case.isa], native.kernels().index(kernel)
    library.ece408_packed_floats.restype = ctypes.c_int64
    floats = library.ece408_packed_floats(problem, code, number)
    packed = guarded.place(np.full(max(floats, 1), np.nan, np.float32), case.side)
    numbers = case.threads, code, number
    x, w, bias, y, at = map(ctypes.c_void_p, (*addresses, packed.ctypes.data))
    status = library.ece408_pack(problem, w, bias, at, *numbers)
    if status == _UNSUPPORTED:
        at = ctypes.c_void_p(None)
    status = library.ece408_forward_packed(problem, x, w, bias, at, None, y, *numbers)
    if status == _UNSUPPORTED:
        raise UnsupportedProblem("its weights are not packed")
    if status:
        raise Ece408Error(f"ece408_forward_packed failed with status {status} on {case.problem}")


def table(ran: Counter[tuple[str, str]], wrong: Counter[tuple[str, str]]) -> str:
    """Return a table of problems and failures by kernel and direction."""
    rows = [(*key, ran[key], wrong[key]) for key in sorted(ran | wrong)]
    return markdown.table(["kernel", "direction", "problems", "wrong"], rows)
