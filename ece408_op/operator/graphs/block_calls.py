"""Calls of hybridized Gluon blocks whose parameters are those of the call before.

For each call Gluon asks every parameter for its array, and MXNet every array for its handle. Since
the last call these objects have left the processor's caches: for the 266 parameters of
mobilenetv2_1.0 that takes 0.1 ms. Here the arrays are compared with those of the last call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

_arrays_of, _first = operator.attrgetter("_data"), operator.itemgetter(0)


def install(mxnet: Any) -> None:
    """Have hybridized blocks with our operator repeat their last call where that is the same."""
    block, array = mxnet.gluon.block, mxnet.nd.NDArray
    plain = block.HybridBlock._call_cached_op

    def is_usual(given: Any) -> bool:
        return type(given) is array and given.context.device_type == "cpu"

    @functools.wraps(plain)
    def call(self: Any, *given: Any) -> Any:
        op = getattr(self._cached_op, "repeatable", None)
        if op is None or self._callback or not all(map(is_usual, given)):
            return plain(self, *given)
        last = op.block_call
        if last is not None and op.can_repeat() and last.is_like(self, given):
            found = op.repeat(last.inputs, {place: given[n] for place, n in last.data.items()})
            found = [found] if isinstance(found, array) else found
            return block._regroup(found, self._out_format)
        result = plain(self, *given)
        op.block_call = _BlockCall.of(mxnet, self, given) if op.can_repeat() else None
        return result

    block.HybridBlock._call_cached_op = call


class _BlockCall:
    """A call of a block.

    `inputs`: the arrays of its parameters, each at its place, and `None` for those that it was
    given; `data`: by their places the numbers of what it was given.
    """

    def __init__(self, said: Sequence[Any], count: int, parameters: list[Any]) -> None:
        self._said, self._count, self._parameters = said, count, parameters
        self._arrays = [_first(_arrays_of(each)) for each in parameters]
        arrays = iter(self._arrays)
        self.inputs = [None if is_given else next(arrays) for is_given, _ in said]
        self.data = {place: each for place, (is_given, each) in enumerate(said) if is_given}

    @classmethod
    def of(cls, mxnet: Any, block: Any, given: Sequence[Any]) -> _BlockCall | None:
        """A block's call; `None` unless each parameter's array is the only one that it has."""
        said, data = block._cached_op_args, mxnet.gluon.Parameter.data
        parameters = [each for is_given, each in said if not is_given]
        if any(type(each).data is not data or len(_arrays_of(each)) > 1 for each in parameters):
            return None
        return cls(said, len(given), parameters)

    def is_like(self, block: Any, given: Sequence[Any]) -> bool:
        """Whether a call is given as many arrays, and the block has the same parameters in the
        same arrays."""
        if block._cached_op_args is not self._said or len(given) != self._count:
            return False
        now = map(_first, map(_arrays_of, self._parameters))
        try:
            return not any(map(operator.is_not, now, self._arrays))
        except TypeError:  # a parameter has no array any more
            return False
