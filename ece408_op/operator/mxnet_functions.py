"""Cache of the code that MXNet generates for its operators' Python functions at import.

MXNet generates the text of about 2300 functions and compiles it, which takes half of the import's
time. The text is the same in every process except for the operator's address. So the code is
compiled with a placeholder for the address and cached; the address is inserted on loading.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from .. import settings
from ..errors import Ece408Error
from ..files import sealed

_MAKERS = ("mxnet.ndarray.register", "mxnet.symbol.register")
# Their functions call these with the operator's address as the first argument.
_CALLS = ("_imperative_invoke(", "_symbol_creator(")
_STAND_IN = 4080408040804080408


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """In the block, which imports MXNet, load its functions' code from the cache, and add missing
    code to the cache."""
    code = _Code(_read())
    finder = _Finder(code)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in finder.found:
            vars(module).pop("exec", None)
    code.save()


class _Code:
    """Code by text, from the cache or compiled."""

    def __init__(self, known: Mapping[bytes, CodeType]) -> None:
        self._known = known
        self._used: dict[bytes, CodeType] = {}

    def of(self, text: str) -> CodeType:
        before, address, behind = _parts(text)
        text = f"{before}{_STAND_IN}{behind}" if address else text
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        code = self._known.get(key) or compile(text, "<string>", "exec", dont_inherit=True)
        self._used[key] = code
        return _with_address(code, int(address)) if address else code

    def save(self) -> None:
        """Save the code used. If the cache cannot be written, nothing happens."""
        if self._used.keys() == self._known.keys():
            return
        with contextlib.suppress(Ece408Error, RuntimeError):
            sealed.write_sealed(_path(), marshal.dumps(self._used))


def _parts(text: str) -> tuple[str, str, str]:
    """Split a function's text at the operator's address; return only the text if it has none."""
    for call in _CALLS:
        before, found, behind = text.partition(call)
        address, comma, rest = behind.partition(",")
        if comma and address.isdigit() and call not in rest:
            return before + found, address, comma + rest
    return text, "", ""


def _with_address(code: CodeType, address: int) -> CodeType:
    constants = tuple(
        _with_address(each, address)
        if isinstance(each, CodeType)
        else (address if each == _STAND_IN else each)
        for each in code.co_consts
    )
    return code.replace(co_consts=constants)


def _path() -> Path:
    """Return the cache's path, per Python version. Raises `RuntimeError` without a home
    directory."""
    version = importlib.util.MAGIC_NUMBER.hex()
    return settings.cache() / "mxnet-functions" / f"{sys.implementation.cache_tag}-{version}.bin"


def _read() -> Mapping[bytes, CodeType]:
    with contextlib.suppress(FileNotFoundError, sealed.Damage, Ece408Error, RuntimeError):
        return marshal.loads(sealed.read_sealed(_path()))
    return {}


class _Finder(MetaPathFinder):
    """Finds the generating modules as Python would, and makes them use `_Code`."""

    def __init__(self, code: _Code) -> None:
        self.found: list[ModuleType] = []
        self._code = code

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _MAKERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self)
        return spec

    def prepare(self, module: ModuleType) -> None:
        """Give a module its own `exec`."""
        space = vars(module)

        def execute(text: str, _: Any, names: dict[str, Any]) -> None:
            exec(self._code.of(text), space, names)

        space["exec"] = execute
        self.found.append(module)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self._finder = finder

    def exec_module(self, module: ModuleType) -> None:
        self._finder.prepare(module)
        super().exec_module(module)
