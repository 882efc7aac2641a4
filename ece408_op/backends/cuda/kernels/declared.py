"""CUDA kernels in users' files, with the launch declared in a comment.

    // ece408: launch convolve<<<dim3(ceil_div(OH * OW, 256), M, B), 256>>>(y, x, w, C, H, W, K)

A launch has CUDA's syntax: grid, block and optionally bytes of dynamic shared memory, each an
integer expression; then the function's arguments: arrays or such expressions. Launches run in
order. `// ece408: workspace BYTES` requests scratch memory for them, named workspace; `// ece408:
constant weights = w` requests a copy of w in a `__constant__` variable. `// ece408: tunable TILE =
16, 8, 32` compiles the file with the macro TILE. Its value is the first one until `ece408 tune` has
found a better one; launches may use it in their expressions.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....errors import InvalidSetting, UnsupportedProblem
from ....problem import ConvProblem
from ...kernel_file import KernelFile, find
from .. import gpu_limits
from ..kernel_plan import (
    ARCHITECTURES,
    Capability,
    Code,
    ConstantCopy,
    Defines,
    Family,
    Grid,
    Kernel,
    Launch,
    Layout,
    Plan,
    Tunables,
    divide_up,
)
from . import layer_macros

_LINE = re.compile(r"^\s*//\s*(ece408:)?(.*)$")
_LAUNCH = re.compile(r"launch\s+(\w+)\s*<<<(.+)>>>\s*\((.*)\)\s*;?$")
_CONSTANT = re.compile(r"constant\s+(\w+)\s*=\s*(x|w)$")
_TUNABLE = re.compile(r"tunable\s+(\w+)\s*=\s*(\d+(?:\s*,\s*\d+)*)$")
_MOST_LAYOUTS = 256
# Characters of a declaration shown in a message.
_MOST_SHOWN = 200
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\(?(\d+)\)?[ \t]*(?://.*)?$", re.M)
_ARRAYS = ("y", "x", "w", "bias", "workspace")
_MOST_GRID = (2**31 - 1, 65535, 65535)
_MOST_BLOCK = (1024, 1024, 64)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # As in C, for non-negative numbers.
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {
    **{"ceil_div": divide_up, "divide_up": divide_up},
    **{"min": min, "max": max},
}


@dataclass(frozen=True)
class _Directive:
    """The text after `// ece408:`, and its line."""

    text: str
    line: int


def kernel(name: str) -> Kernel:
    """Return the kernel of a file that declares its launch.

    Raises `InvalidSetting` for a missing file or one of another form, and, with the line, for an
    invalid declaration.
    """
    file = find(name)
    if file.form != "declared":
        raise InvalidSetting(
            f"kernel file {file.path} launches its kernel itself, and has no plan that could be "
            "timed or tuned; m3.1, m4.1 and cuda_kernel run it"
        )
    return _kernel(file)


@functools.lru_cache(maxsize=64)
def _kernel(file: KernelFile) -> Kernel:
    family = _Declared(file)
    # Report invalid declarations now rather than at the first layer.
    family.plan_of(ConvProblem.parse("b1,c1,h9,w9,m1,k3x3"), False)
    code = (file.name, str(file.path), ARCHITECTURES, "float32", True)
    return Kernel(*code, "forward", f"the file {file.name}", family)


@dataclass(frozen=True)
class _Numbers(Layout):
    """The values of the file's tunables."""

    numbers: Tunables = ()

    @property
    def tunables(self) -> Tunables:
        return self.numbers

    @property
    def defines(self) -> Defines:
        return self.numbers


class _Declared(Family):
    """The kernels that a file declares, for the problems whose variables it mentions."""

    def __init__(self, file: KernelFile) -> None:
        self._file = file
        directives = list(_directives(file.text))
        self._launches = [each for each in directives if each.text.startswith("launch")]
        tunables = [each for each in directives if each.text.startswith("tunable")]
        self._others = [each for each in directives if each not in (*self._launches, *tunables)]
        if not self._launches:
            raise InvalidSetting(f"kernel file {file.path} declares no launch")
        self._numbers = {name: int(value) for name, value in _DEFINE.findall(file.text)}
        self._layouts = self._combined(tunables)
        self._words = set(re.findall(r"\w+", " ".join(each.text for each in directives)))
        self._includes = set(re.findall(r'#\s*include\s+"([^"]+)"', file.text))

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.dtype != "float32":
            return f"it computes float32 only, not {problem.dtype}"
        if problem.bias and "bias" not in self._words:
            return "its launch does not mention bias"
        if problem.kernel[0] != problem.kernel[1] and not self._mentions("KH KW", "KERNEL"):
            return "its launch mentions no KH and KW, so kernels are square"
        if problem.stride[0] == problem.stride[1] != 1 and "S" in self._words:
            pass
        elif problem.stride != (1, 1) and not self._mentions("SH SW", "STRIDE"):
            return "its launch mentions no S, nor SH and SW, so strides are 1"
        if problem.pad != (0, 0) and not self._mentions("PH PW", "PAD"):
            return "its launch mentions no PH and PW, so there is no padding"
        if problem.dilate != (1, 1) and not self._mentions("DH DW", "DILATE"):
            return "its launch mentions no DH and DW, so there is no dilation"
        if problem.groups != 1 and "G" not in self._words:
            return "its launch mentions no G, so there is one group"
        reasons = [_beyond_limits(self.plan_of(problem, False, each)) for each in self._layouts]
        return reasons[0] if all(reasons) else None

    def layouts(self, problem: ConvProblem, capability: Capability) -> Sequence[Layout]:
        return [
            each
            for each in self._layouts
            if _beyond_limits(self.plan_of(problem, False, each)) is None
        ]

    def activates(self, accumulate: bool) -> bool:
        return False

    def plan(self, kernel: Code, problem: ConvProblem, layout: Layout, accumulate: bool) -> Plan:
        """Raises `UnsupportedProblem` if the result is to be added to y and the file cannot do
        so."""
        if accumulate and "output.cuh" not in self._includes:
            raise UnsupportedProblem(
                f"kernel file {self._file.name} overwrites y and cannot add to it; include "
                '"output.cuh" and write each result by its store'
            )
        return self.plan_of(problem, accumulate, layout, kernel)

    def plan_of(
        self,
        problem: ConvProblem,
        accumulate: bool,
        layout: Layout | None = None,
        kernel: Code | None = None,
    ) -> Plan:
        """Return the plan; the layout defaults to the first one, the kernel to an unnamed one."""
        layout = layout or self._layouts[0]
        names = {**self._numbers, **dict(layout.tunables), **_names(problem)}
        launches = tuple(self._launch(each, names) for each in self._launches)
        constants, workspace = [], 0
        for each in self._others:
            match = _CONSTANT.match(each.text)
            if match:
                shape = {"x": problem.x_shape, "w": problem.w_shape}[match[2]]
                nbytes = 4 * functools.reduce(operator.mul, shape)
                place = f"{self._file.name}:{each.line}"
                constants.append(ConstantCopy(match[1], match[2], nbytes, place))
            elif each.text.startswith("workspace "):
                workspace = self._numbers_of(each, each.text.split(None, 1)[1], names)[0]
            else:
                raise self._invalid(each, "is no launch NAME<<<...>>>(...), workspace BYTES, "
                                    "constant NAME = w or tunable NAME = 1, 2, ...")  # fmt: skip
        code = kernel or Code(self._file.name, str(self._file.path), ARCHITECTURES, "float32", True)
        defines = (*self._defines(problem, accumulate), *layout.defines)
        return Plan(code, defines, launches, tuple(constants), workspace)

    def _combined(self, directives: Sequence[_Directive]) -> list[_Numbers]:
        """Return all combinations of the tunables' values, varying the last one fastest."""
        axes = []
        for each in directives:
            match = _TUNABLE.match(each.text)
            if match is None:
                raise self._invalid(each, "should be tunable NAME = 1, 2, ...")
            name = match[1]
            if name in self._numbers and f"#ifndef {name}" not in self._file.text:
                raise self._invalid(each, f"is #defined in the file, too; put #ifndef {name} there")
            axes.append([(name, int(number)) for number in match[2].split(",")])
        count = functools.reduce(operator.mul, map(len, axes), 1)
        if count > _MOST_LAYOUTS:
            raise self._invalid(
                directives[-1], f"makes {count} combinations, more than {_MOST_LAYOUTS}"
            )
        return [_Numbers(tuple(numbers)) for numbers in itertools.product(*axes)]

    def _launch(self, directive: _Directive, names: Mapping[str, int]) -> Launch:
        match = _LAUNCH.match(directive.text)
        if match is None:
            raise self._invalid(directive, "should be launch NAME<<<grid, block>>>(arguments)")
        function, configuration, arguments = match.groups()
        parts = self._parse(directive, configuration)
        if len(parts) not in (2, 3):
            raise self._invalid(directive, "should have a grid, a block and perhaps bytes")
        grid, block = (self._grid(directive, part, names) for part in parts[:2])
        shared = self._evaluate(directive, parts[2], names) if len(parts) == 3 else 0
        given = [
            part.id if isinstance(part, ast.Name) and part.id in _ARRAYS
            else self._evaluate(directive, part, names)
            for part in self._parse(directive, arguments)
        ]  # fmt: skip
        return Launch(function, grid, block, tuple(given), shared)

    def _grid(self, directive: _Directive, part: ast.expr, names: Mapping[str, int]) -> Grid:
        numbers = [part]
        if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "dim3":
            numbers = part.args
        found = [self._evaluate(directive, each, names) for each in numbers]
        if not 1 <= len(found) <= 3:
            raise self._invalid(directive, "should have dim3 of one to three numbers")
        x, y, z = (*found, 1, 1)[:3]
        return x, y, z

    def _numbers_of(self, directive: _Directive, text: str, names: Mapping[str, int]) -> list[int]:
        return [self._evaluate(directive, part, names) for part in self._parse(directive, text)]

    def _parse(self, directive: _Directive, text: str) -> list[ast.expr]:
        """Parse comma-separated expressions."""
        try:
            tree = ast.parse(f"({text.strip()},)", mode="eval") if text.strip() else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            given = _short(text.strip())
            raise self._invalid(directive, f"has {given!r}, which does not parse") from None
        return [] if tree is None else list(tree.body.elts)  # type: ignore[attr-defined]

    def _evaluate(self, directive: _Directive, node: ast.expr, names: Mapping[str, int]) -> int:
        def value(node: ast.AST) -> int:
            if isinstance(node, ast.Constant) and type(node.value) is int:
                return node.value
            if isinstance(node, ast.Name) and node.id in names:
                return names[node.id]
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _FUNCTIONS:
                return _FUNCTIONS[node.func.id](*map(value, node.args))  # type: ignore[attr-defined]
            known = f"{', '.join(_names(_ANY))}, #define numbers, tunables, ceil_div, min, max"
            raise self._invalid(directive, f"has {_text(node)!r}; there are {known}")

        try:
            return value(node)
        except (ZeroDivisionError, TypeError, RecursionError) as error:
            raise self._invalid(directive, f"has {_text(node)!r}: {error}") from None

    def _defines(self, problem: ConvProblem, accumulate: bool) -> Defines:
        """Return the macros of shape.cuh and output.cuh if the file includes them, and the text's
        checksum, so that changed code becomes another module."""
        shape = {
            "CHANNELS": problem.channels // problem.groups, "HEIGHT": problem.height,
            "WIDTH": problem.width, "FILTERS": problem.filters // problem.groups,
            **_pair("KERNEL", problem.kernel), **_pair("STRIDE", problem.stride),
            **_pair("PAD", problem.pad), **_pair("DILATE", problem.dilate),
        }  # fmt: skip
        given = tuple(shape.items()) if "shape.cuh" in self._includes else ()
        output = (
            layer_macros.output(problem.bias, accumulate) if "output.cuh" in self._includes else ()
        )
        return (*given, *output, ("ECE408_TEXT", f"0x{self._file.key}"))

    def _mentions(self, names: str, macro: str) -> bool:
        """Return whether the launch mentions both names, or the file uses shape.cuh's macros
        instead."""
        in_macros = "shape.cuh" in self._includes and {f"{macro}_H", f"{macro}_W"} <= set(
            re.findall(r"\w+", self._file.text)
        )
        return set(names.split()) <= self._words or in_macros

    def _invalid(self, directive: _Directive, what: str) -> InvalidSetting:
        return InvalidSetting(
            f"{self._file.path}:{directive.line}: '// ece408: {_short(directive.text)}' {what}"
        )


_ANY = ConvProblem.parse("b1,c1,h1,w1,m1,k1x1")


def _names(problem: ConvProblem) -> dict[str, int]:
    """Return the variables of expressions."""
    return {
        "B": problem.batch, "M": problem.filters, "C": problem.channels,
        "H": problem.height, "W": problem.width, "K": problem.kernel[0],
        "KH": problem.kernel[0], "KW": problem.kernel[1],
        "OH": problem.out_height, "OW": problem.out_width, "S": problem.stride[0],
        "SH": problem.stride[0], "SW": problem.stride[1],
        "PH": problem.pad[0], "PW": problem.pad[1],
        "DH": problem.dilate[0], "DW": problem.dilate[1], "G": problem.groups,
    }  # fmt: skip


def _pair(name: str, numbers: tuple[int, int]) -> dict[str, int]:
    return {f"{name}_H": numbers[0], f"{name}_W": numbers[1]}


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _text(node: ast.AST) -> str:
    """An expression as it is written."""
    try:
        return _short(ast.unparse(node))
    except RecursionError:
        return "an expression that is nested too deeply"


def _directives(text: str) -> Iterator[_Directive]:
    """Each with the comment lines that follow as long as a bracket is open."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        match = _LINE.match(line)
        if match is None or not match[1]:
            continue
        found = match[2].strip()
        for further in lines[number:]:
            more = _LINE.match(further)
            if found.count("(") <= found.count(")") or more is None or more[1]:
                break
            found += " " + more[2].strip()
        yield _Directive(found, number)


def _beyond_limits(plan: Plan) -> str | None:
    """What a launch has too much or too little of, or `None`."""
    for launch in plan.launches:
        for name, numbers, most in (
            ("grid", launch.grid, _MOST_GRID),
            ("block", launch.block, _MOST_BLOCK),
        ):
            if any(not 1 <= number <= top for number, top in zip(numbers, most)):
                return f"its {name} of {launch.function} would be {numbers}, of 1 to {most}"
        x, y, z = launch.block
        if x * y * z > gpu_limits.THREADS:
            return f"its block of {launch.function} would have {x * y * z} threads, more than 1024"
    for copy in plan.constants:
        if copy.nbytes > gpu_limits.CONSTANT_BYTES:
            return f"{copy.array} takes {copy.nbytes} bytes, and constant memory has 65536"
    return None
