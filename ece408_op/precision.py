"""How exact a convolution must be: what a caller permits, and what a computation was."""

from __future__ import annotations

from .errors import InvalidSetting

# The strictest first; each permits everything that those before it permit.
PRECISIONS = ("float32", "tf32", "float16")


def check(name: str) -> str:
    """The name, if it is one of `PRECISIONS`. Raises `InvalidSetting` if not."""
    if name not in PRECISIONS:
        raise InvalidSetting(
            f"unknown precision {name!r}; choose one of {', '.join(PRECISIONS)} (attribute "
            "precision, --precision, ECE408_PRECISION)"
        )
    return name
