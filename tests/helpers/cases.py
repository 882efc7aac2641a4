"""One test for many cases, which reports all that fail."""

import functools
import inspect
import itertools
from collections.abc import Iterable
from typing import Any, Callable

import pytest


def _text(case: dict[str, Any]) -> str:
    """Return the case as name=value; objects with a name, such as kernels, appear by name."""
    return ", ".join(f"{name}={getattr(value, 'name', value)}" for name, value in case.items())


def every(**axes: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with every combination of the values; the other arguments are fixtures.

    The fixtures are the same objects in all calls. The failure has a line for each failed
    combination, and the first one's traceback.
    """
    combinations = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            failures = []
            for case in combinations:
                try:
                    test(**fixtures, **case)
                except Exception as error:
                    failures.append((case, error))
            if failures:
                lines = "\n".join(f"{_text(case)}: {error!r}" for case, error in failures)
                message = f"{len(failures)} of {len(combinations)} cases fail\n{lines}"
                raise AssertionError(message) from failures[0][1]

        parameters = inspect.signature(test).parameters
        others = [each for name, each in parameters.items() if name not in axes]
        run_all.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run_all

    return decorate


def first(quick: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases, all but the first `quick` marked slow; one of several values is a
    tuple."""
    more = list(cases)
    return more[:quick] + [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.slow)
        for each in more[quick:]
    ]
