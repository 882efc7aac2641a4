"""Guards against MXNet handing our operator memory that it has already freed.

On the CPU, oneDNN's operators leave their results, and weights they have used, in blocked
layouts. MXNet 1.9 gives a custom operator a temporary plain copy of such an array and frees the
copy before the operator, on a thread of its own, reads it: silent wrong results, in the forward
pass through data and weight, in the backward pass through the gradient of the output. Module and
Executor do not do it (see bare_graphs); imperative code and a CachedOp, even a static one, do.

The guards are operators of MXNet that compute on plain arrays and so convert what they read.
"""

from __future__ import annotations

from typing import Any

_INFINITY = float("inf")


def plain_data(namespace: Any, array: Any, **name: str) -> Any:
    """The same values in plain layout; `namespace` is `mx.nd` or `mx.sym`.

    Reshape converts where identity and multiplication by 1 hand the blocked layout on. In a
    graph, an array that is plain already is not copied.
    """
    return namespace.reshape(array, shape=(-2,), **name)


def plain_parameter(namespace: Any, array: Any, **name: str) -> Any:
    """The same values in plain layout, always copied; shapes are inferred through it both ways.

    Multiplying the gradient by 1 copies several times faster than clip. Like other operators that
    may work in place it hands on the layout of another operator's result, but an NDArray or a
    graph's variable is never overwritten.
    """
    is_result = hasattr(array, "get_children") and array.get_children() is not None
    if is_result:
        return namespace.clip(array, a_min=-_INFINITY, a_max=_INFINITY, **name)
    return namespace.contrib.gradientmultiplier(array, scalar=1.0, **name)


def plain_gradient(namespace: Any, array: Any, **name: str) -> Any:
    """The same values, by an operator whose gradient is in plain layout whatever it is given.

    In a CachedOp, operators that may compute their gradient in place (reshape, identity, cast)
    leave it in blocked layout. Clip's is never in place, and its forward pass always is.
    """
    return namespace.clip(array, a_min=-_INFINITY, a_max=_INFINITY, **name)
