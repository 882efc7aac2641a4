"""JSON with one record per line, for files under version control."""

from __future__ import annotations

import json
from typing import Any


def to_json(document: dict[str, Any]) -> str:
    """Return the document as JSON text that ends with a newline.

    Lists of objects have one item per line, unless the items contain lists of such objects.
    """
    return _text(document, "") + "\n"


def _text(value: Any, indent: str, is_item: bool = False) -> str:
    depth = _depth(value)
    if depth <= 1 or (depth == 2 and isinstance(value, dict)) or (depth <= 3 and is_item):
        return json.dumps(value)
    inner = f"{indent} "
    if isinstance(value, dict):
        opening, closing = "{}"
        parts = [f"{json.dumps(key)}: {_text(each, inner)}" for key, each in value.items()]
    else:
        opening, closing = "[]"
        parts = [_text(each, inner, is_item=True) for each in value]
    lines = ",\n".join(f"{inner}{part}" for part in parts)
    return f"{opening}\n{lines}\n{indent}{closing}"


def _depth(value: Any) -> int:
    """Return the nesting depth of objects and lists."""
    if not isinstance(value, (dict, list, tuple)):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, items), default=0)
