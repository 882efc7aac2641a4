"""Typed access to node attributes, which MXNet stores as strings."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any, Callable, TypeVar

from ..errors import InvalidProblem

_UNSET = ("None", "_Null", "")
_T = TypeVar("_T")
# Nodes of a network repeat a few attribute values.
_literal = functools.lru_cache(maxsize=1024)(ast.literal_eval)


class Attributes:
    """The attributes of a node of `op`, with typed accessors.

    All methods raise `InvalidProblem` for unreadable text and for a missing attribute without a
    default.
    """

    def __init__(self, op: str, given: Mapping[str, str]) -> None:
        self.op = op
        self._given = {name: str(text).strip() for name, text in given.items()}
        self._known: dict[Any, Any] = {}

    def once(self, read: Callable[[Attributes], _T]) -> _T:
        """Return what `read` makes of the attributes, made once: they are those of one node, for
        all sizes of its arrays."""
        if read not in self._known:
            self._known[read] = read(self)
        found: _T = self._known[read]
        return found

    def is_set(self, name: str) -> bool:
        return self._given.get(name, "") not in _UNSET

    def text(self, name: str, default: str) -> str:
        return self._given[name] if self.is_set(name) else default

    def flag(self, name: str, default: bool = False) -> bool:
        text = self.text(name, str(default))
        if text.lower() not in ("true", "false", "0", "1"):
            raise self._wrong(name)
        return text.lower() in ("true", "1")

    def number(self, name: str, default: float | None = None) -> float:
        if not self.is_set(name) and default is None:
            raise self._missing(name)
        try:
            return float(self.text(name, str(default)))
        except ValueError:
            raise self._wrong(name) from None

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self._literal(name, default, int))

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return integers; a single one becomes a tuple of one."""
        found = self._literal(name, default, (int, tuple, list))
        values = (found,) if isinstance(found, int) else tuple(found)
        if not all(isinstance(value, int) for value in values):
            raise self._wrong(name)
        return values

    def _literal(self, name: str, default: Any, kinds: Any) -> Any:
        if not self.is_set(name):
            if default is None:
                raise self._missing(name)
            return default
        try:
            found = _literal(self._given[name])
        except (ValueError, SyntaxError):
            raise self._wrong(name) from None
        if not isinstance(found, kinds) or isinstance(found, bool):
            raise self._wrong(name)
        return found

    def _missing(self, name: str) -> InvalidProblem:
        return InvalidProblem(f"{self.op}: required attribute {name} is not given")

    def _wrong(self, name: str) -> InvalidProblem:
        return InvalidProblem(f"{self.op}: cannot read {name}={self._given[name]}")
