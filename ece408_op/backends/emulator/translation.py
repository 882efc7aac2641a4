"""Translator from CUDA C++ to C++: nvcc's extensions become calls of kernels/emulator.

The input is preprocessed text: macros are expanded, comments are gone, and lines like `# 12
"file.cu"` give locations. Two constructs are rewritten: launches, `kernel<<<...>>>(...)`, and
shared variables, static and dynamic. The headers in kernels/emulator/include define the rest of
CUDA.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])\'(?:\\.|[^\'\\\n])*\'')
_MARKER = re.compile(r'^# (\d+) "([^"\n]*)"((?: \d)*)$', re.M)
_LAUNCH = re.compile(r"<<\s*<")
_CALLEE = re.compile(r"(?:::\s*)?(?:[A-Za-z_]\w*\s*(?:<[^;{}]*>)?\s*::\s*)*[A-Za-z_]\w*\s*$")
_SHARED = re.compile(r"\b__shared__\b")
_STATEMENT = re.compile(r"[^;{}]+")
_ALIGNMENT = re.compile(r"\balignas\s*\(([^()]*(?:\([^()]*\))?[^()]*)\)")
# It cannot be a macro: the standard library uses the word within attributes.
_NO_INLINE = re.compile(r"(?<!\()\b__noinline__\b")
_ASSEMBLER = re.compile(r"\b(?:asm|__asm__|__asm)\b")
_OPEN, _CLOSE = "([{", ")]}"
_UNCHECKED = '__attribute__((no_sanitize("thread"), no_sanitize("bounds")))'
_SYSTEM = "3"
# Unsupported features, by a word that occurs in them.
_UNKNOWN = {
    re.compile(r"\btex(?:1D|2D|3D)\w*\s*[<(]|\btexture\s*<"): "textures",
    re.compile(r"\bECE408_EMULATOR_HAS_NO_CLUSTERS\b"): "clusters of blocks",
}


class Untranslated(Exception):
    """A construct that is not emulated; `str()` is "file:line: what". `is_unknown`: it is valid
    CUDA."""

    def __init__(self, text: str, is_unknown: bool = False) -> None:
        super().__init__(text)
        self.is_unknown = is_unknown


@dataclass
class _Source:
    """A text, a copy with literals blanked, and the locations of its lines."""

    text: str

    def __post_init__(self) -> None:
        self.masked = _LITERAL.sub(lambda m: m[0][0] + "_" * (len(m[0]) - 2) + m[0][-1], self.text)
        self._markers = list(_MARKER.finditer(self.text))
        self._starts = [marker.start() for marker in self._markers]

    def _marker(self, at: int) -> re.Match[str] | None:
        index = bisect.bisect_right(self._starts, at) - 1
        return self._markers[index] if index >= 0 else None

    def is_system(self, at: int) -> bool:
        marker = self._marker(at)
        return marker is not None and _SYSTEM in marker[3].split()

    def place(self, at: int) -> str:
        """ "file:line" of an offset."""
        marker = self._marker(at)
        if marker is None:
            return f"line {self.text.count(chr(10), 0, at) + 1}"
        lines = self.text.count("\n", marker.end(), at) - 1
        return f"{marker[2]}:{int(marker[1]) + lines}"

    def end_of(self, begin: int) -> int:
        """Return the offset after the bracket that closes the one at `begin`."""
        depth = 0
        for match in re.compile(r"[()\[\]{}]").finditer(self.masked, begin):
            depth += 1 if match[0] in _OPEN else -1
            if not depth:
                return match.end()
        raise Untranslated(f"{self.place(begin)}: a bracket is not closed")


def last_place(text: str, part: str) -> str:
    """Return "file:line" of the last place in a preprocessed text that contains `part`."""
    return _Source(text).place(text.rfind(part))


def translate(text: str) -> str:
    """Return C++ for g++ and clang++ with the same lines. Raises `Untranslated`."""
    source = _Source(_STATEMENT.sub(_with_alignments_of_gnu, text))
    _refuse_unknown(source)
    edits = [_launch(source, match.start()) for match in _LAUNCH.finditer(source.masked)]
    edits += [
        (*match.span(), "__attribute__((noinline))") for match in _NO_INLINE.finditer(source.masked)
    ]
    names: dict[str, tuple[int, str]] = {}
    end = -1
    for number, match in enumerate(_SHARED.finditer(source.masked)):
        if match.start() > end:
            edits.append(_declaration(source, match, number, names))
            end = edits[-1][1]
    text = _edited(source, sorted(edits))
    # Also in the arguments of launches.
    for name, (at, call) in names.items():
        text = _renamed(text, name, at, call)
    return text


def _with_alignments_of_gnu(match: re.Match[str]) -> str:
    """Rewrite alignas in a declaration of shared variables: it becomes a typedef, which takes
    none."""
    if _SHARED.search(match[0]) is None:
        return match[0]
    return _ALIGNMENT.sub(r"__attribute__((aligned(\1)))", match[0])


def _edited(source: _Source, edits: Sequence[tuple[int, int, str]]) -> str:
    parts, at = [], 0
    for begin, end, new in edits:
        if begin < at:
            raise Untranslated(f"{source.place(begin)}: a launch within another's arguments")
        lines = source.text.count("\n", begin, end) - new.count("\n")
        parts += [source.text[at:begin], new, "\n" * lines]
        at = end
    return "".join([*parts, source.text[at:]])


def _renamed(text: str, name: str, line: int, call: str) -> str:
    """Return the text with a variable's name replaced after a line."""
    masked = _Source(text).masked
    begin = 0
    for _ in range(line):
        begin = masked.index("\n", begin) + 1
    parts, at = [], 0
    for match in re.finditer(rf"(?<![\w.>:]){name}\b", masked[begin:]):
        parts += [text[at : begin + match.start()], call]
        at = begin + match.end()
    return "".join([*parts, text[at:]])


def _refuse_unknown(source: _Source) -> None:
    found = [
        (match.start(), what)
        for pattern, what in {**_UNKNOWN, _ASSEMBLER: "PTX (asm)"}.items()
        for match in pattern.finditer(source.masked)
        if not source.is_system(match.start())
    ]
    if found:
        at, what = min(found)
        raise Untranslated(f"{source.place(at)}: {what} cannot run without a GPU", True)


def _launch(source: _Source, at: int) -> tuple[int, int, str]:
    """Rewrite `kernel<<<configuration>>>(arguments)`: return its begin and end, and a call."""
    text, masked = source.text, source.masked
    begin = _callee_begin(source, at)
    inner = _LAUNCH.match(masked, at)
    assert inner is not None
    depth, end = 0, None
    for match in re.compile(r"[()\[\]{};]|>>\s*>").finditer(masked, inner.end()):
        if match[0] == ";" or depth < 0:
            break
        if match[0][0] == ">" and not depth:
            end = match
            break
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
    rest = re.compile(r"\s*\(").match(masked, end.end()) if end else None
    if end is None or rest is None:
        raise Untranslated(f"{source.place(at)}: '<<<' begins no launch that has an end")
    stop = source.end_of(rest.end() - 1)
    kernel = text[begin:at].strip()
    # The type of plain NULL would be an integer.
    arguments = re.sub(r"\b__null\b", "nullptr", text[rest.end() : stop - 1])
    name = " ".join(kernel.split()).replace("\\", "").replace('"', "")
    call = (
        f"::ece408_emulator::Launch({text[inner.end() : end.start()]}).run("
        f'"{name}", [&](auto... ece408_each) {_UNCHECKED} {{ {kernel}(ece408_each...); }}'
    )
    return begin, stop, f"{call}{', ' if arguments.strip() else ''}{arguments})"


def _callee_begin(source: _Source, at: int) -> int:
    """Return the start of the kernel's name, including its namespace and template arguments."""
    head = source.masked[:at].rstrip()
    end = len(head)
    # For a pointer in an array the name precedes the index.
    if head.endswith((")", ">", "]")):
        end = _opening(head)
        if head.endswith(")"):
            return end
    line = max(source.masked.rfind(each, 0, end) for each in ";{}") + 1
    match = _CALLEE.search(source.masked[line:end])
    if match is None:
        raise Untranslated(f"{source.place(at)}: no kernel's name stands before '<<<'")
    return line + match.start()


def _opening(text: str) -> int:
    """Return the offset of the bracket that the text's last character closes."""
    depth = angles = 0
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] in _CLOSE) - (text[index] in _OPEN)
        if not depth:
            angles += (text[index] == ">") - (text[index] == "<")
            if not angles:
                return index
    return 0


def _declaration(
    source: _Source, match: re.Match[str], number: int, names: dict[str, tuple[int, str]]
) -> tuple[int, int, str]:
    """Rewrite a declaration of shared variables: return its begin and end, and the replacement.

    The replacement consists of references. Variables outside functions become functions that return
    them; `names` maps these variables to the calls, and to the line from which they apply, so such
    a name must be unique.
    """
    text, masked = source.text, source.masked
    begin = max(masked.rfind(each, 0, match.start()) for each in ";{})\n>") + 1
    before = masked[begin : match.start()]
    # Words such as "static" only; a preprocessor marker ends at its line.
    if not re.fullmatch(r"[\sA-Za-z_]*", before):
        begin, before = match.start(), ""
    end = _statement_end(source, match.end())
    words = before.split()
    is_dynamic = "extern" in words
    declared = text[match.end() : end - 1]
    if re.match(r"\s*extern\b", declared):
        is_dynamic, declared = True, re.sub(r"\bextern\b", "", declared, count=1)
    is_outside = _is_outside_functions(source, begin)
    kept = " ".join(each for each in words if each not in ("extern", "static"))
    made = []
    base = ""
    for index, each in enumerate(_split(declared)):
        head, name, dimensions = _declarator(source, match.start(), each)
        if not index:
            base = f"{kept} {head}".rstrip("*& \t\n")
            stars = f"{kept} {head}"[len(base) :]
        else:
            stars = head
        own = f"ece408_shared_{number}_{index}"
        type_, value = _variable(f"{base} {stars}", own, dimensions, is_dynamic)
        mark = "*" if is_dynamic else "&"
        if is_outside:
            made.append(f"{type_} static inline {own}{mark} {own}_get() {{ return {value}; }}")
            names[name] = (text.count("\n", 0, end), f"{own}_get()")
        else:
            made.append(f"{type_} {own}{mark} {name} = {value};")
    return begin, end, " " + " ".join(made)


def _statement_end(source: _Source, at: int) -> int:
    depth = 0
    for match in re.compile(r"[()\[\]{};]").finditer(source.masked, at):
        if match[0] == ";" and not depth:
            return match.end()
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
    raise Untranslated(f"{source.place(at)}: a declaration of shared memory has no end")


def _split(declared: str) -> list[str]:
    """Split declarators at commas outside brackets."""
    parts, depth, angles, begin = [], 0, 0, 0
    for index, each in enumerate(declared):
        depth += (each in _OPEN) - (each in _CLOSE)
        if not depth:
            angles += (each == "<") - (each == ">")
        if each == "," and not depth and not angles:
            parts.append(declared[begin:index])
            begin = index + 1
    return [*parts, declared[begin:]]


def _declarator(source: _Source, at: int, text: str) -> tuple[str, str, str]:
    """Return the text before a variable's name, the name, and its dimensions."""
    match = re.fullmatch(
        r"(.*?)([A-Za-z_]\w*)\s*((?:\[[^\]]*(?:\[[^\]]*\][^\]]*)*\]\s*)*)", text.strip(), re.S
    )
    if match is None:
        raise Untranslated(
            f"{source.place(at)}: a shared variable that is not emulated: {text.strip()}"
        )
    return match[1], match[2], match[3].strip()


def _variable(base: str, made: str, dimensions: str, is_dynamic: bool) -> tuple[str, str]:
    """Return a variable's type and location: a pointer if its size depends on the launch."""
    if is_dynamic:
        rest = dimensions.partition("]")[2]
        return (
            f"typedef {base} {made} {rest};",
            f"static_cast<{made}*>(::ece408_emulator::dynamic_shared(alignof({made})))",
        )
    return (
        f"typedef {base} {made} {dimensions}; static ::ece408_emulator::Slot {made}_slot;",
        f"*static_cast<{made}*>(::ece408_emulator::shared("
        f"&{made}_slot, sizeof({made}), alignof({made})))",
    )


def _is_outside_functions(source: _Source, at: int) -> bool:
    """Return whether only namespaces and linkage specifications enclose this offset."""
    depth = 0
    for index in range(at - 1, -1, -1):
        each = source.masked[index]
        if each == "}":
            depth += 1
        elif each == "{":
            if depth:
                depth -= 1
            elif not re.search(
                r'(?:\bnamespace\b[^;{}()]*|\bextern\s*"_*")\s*$', source.masked[:index][-200:]
            ):
                return False
    return True
