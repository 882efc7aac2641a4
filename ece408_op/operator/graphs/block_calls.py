"""Fast repeated calls of hybridized Gluon blocks with unchanged parameters.

In each call Gluon gets the array of every parameter, and MXNet the handle of every array. These
objects have left the processor's caches since the last call: for the 266 parameters of
mobilenetv2_1.0 this takes 0.1 ms. Here a parameter reports when its arrays are replaced.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from typing import Any

from ..native_handles import locked_library

_data_of, _first = operator.attrgetter("_data"), operator.itemgetter(0)


def install(mxnet: Any) -> None:
    """Make hybridized blocks with our operator repeat their last call if it is the same."""
    _Changes.watch(mxnet.gluon.Parameter)
    block, array = mxnet.gluon.block, mxnet.nd.NDArray
    plain, plain_forward = block.HybridBlock._call_cached_op, block.HybridBlock.forward

    @functools.wraps(plain_forward)
    def forward(self: Any, x: Any, *rest: Any) -> Any:
        op: Any = getattr(self._cached_op, "repeatable", None)
        last = op.block_call if op is not None and self._active and not self._callback else None
        if last is None:
            return plain_forward(self, x, *rest)
        given = (x, *rest)
        result = last.directly(self, given)
        if result is not None:
            return result
        if not op.can_repeat() or not last.is_like(self, given):
            return plain_forward(self, x, *rest)
        found = op.repeat(last.inputs, {place: given[n] for place, n in last.data.items()})
        found = [found] if isinstance(found, array) else found
        return block._regroup(found, self._out_format)

    @functools.wraps(plain)
    def call(self: Any, *given: Any) -> Any:
        result = plain(self, *given)
        op = getattr(self._cached_op, "repeatable", None)
        if op is not None and not self._callback and all(type(each) is array for each in given):
            op.block_call = _BlockCall.of(mxnet, self, given) if op.can_repeat() else None
        return result

    block.HybridBlock.forward, block.HybridBlock._call_cached_op = forward, call


class _Changes:
    """Counts replacements of any parameter's arrays."""

    count = 0

    @classmethod
    def watch(cls, parameter: Any) -> None:
        plain = parameter.__setattr__

        def set_attribute(self: Any, name: str, value: Any) -> None:
            if name == "_data":
                cls.count += 1
            plain(self, name, value)

        parameter.__setattr__ = set_attribute


class _BlockCall:
    """A call of a block.

    `inputs`: the arrays of its parameters in their positions, and `None` for arguments; `data`: the
    argument numbers by position.
    """

    def __init__(self, mxnet: Any, block: Any, given: Sequence[Any]) -> None:
        self._said, self._regroup = block._cached_op_args, mxnet.gluon.block._regroup
        self._held = block._cached_op.repeatable.held
        self._types = tuple(map(type, given))
        self._contexts = [each.context for each in given]
        self._parameters = [each for is_given, each in self._said if not is_given]
        self._changes = _Changes.count
        # The list of arrays of each parameter, which contains one.
        self._lists = list(map(_data_of, self._parameters))
        self._arrays = list(map(_first, self._lists))
        addresses = ctypes.c_void_p * len(self._lists)
        self._compared = [addresses(*map(id, each)) for each in (self._lists, self._arrays)]
        arrays = iter(self._arrays)
        self.inputs = [None if is_given else next(arrays) for is_given, _ in self._said]
        self.data = {place: each for place, (is_given, each) in enumerate(self._said) if is_given}

    @classmethod
    def of(cls, mxnet: Any, block: Any, given: Sequence[Any]) -> _BlockCall | None:
        """Return a block's call; `None` unless each parameter has a single array, and all are on
        the CPU."""
        said, data = block._cached_op_args, mxnet.gluon.Parameter.data
        parameters = [each for is_given, each in said if not is_given]
        if any(type(each).data is not data or len(_data_of(each)) > 1 for each in parameters):
            return None
        on_cpu = all(each.context.device_type == "cpu" for each in given)
        return cls(mxnet, block, given) if on_cpu else None

    def directly(self, block: Any, given: Sequence[Any]) -> Any:
        """Return the block's result without MXNet's CachedOp if possible, else `None`.

        Around a call no Python code is in the processor's caches, so each additional function takes
        some microseconds.
        """
        if self._held is None or not self._has_parameters_of(block, given):
            return None
        data = [given[number] for number in self.data.values()]
        found = self._held.directly(self.inputs, data, self._compared)
        if found is None:
            return None
        return found[0] if block._out_format == 0 else self._regroup(found, block._out_format)

    def is_like(self, block: Any, given: Sequence[Any]) -> bool:
        """Return whether a call has as many arguments on the same devices, and the block has the
        same parameters in the same arrays."""
        if not self._has_parameters_of(block, given):
            return False
        if [each.context for each in given] != self._contexts:
            return False
        return bool(locked_library().ece408_are_first(*self._compared, len(self._lists)))

    def _has_parameters_of(self, block: Any, given: Sequence[Any]) -> bool:
        """Return whether a call has as many arguments, and the block has the same parameters with
        the same lists of arrays."""
        if block._cached_op_args is not self._said or tuple(map(type, given)) != self._types:
            return False
        changes = _Changes.count
        if changes != self._changes:
            if any(map(operator.is_not, map(_data_of, self._parameters), self._lists)):
                return False
            self._changes = changes
        return True
