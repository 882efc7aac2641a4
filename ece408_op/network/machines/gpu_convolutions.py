"""Convolutions of a network on a GPU, with what their kernels fuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...backends.cuda.kernel_plan import Defines, Kernel, Plan, Target
from ...backends.cuda.kernels import catalog, tuned
from ...problem import ConvProblem
from ..builder import Builder, Chain, Convolution
from ..terms import leaf, substituted
from ..values import Value
from .cuda_terms import statements

# The kernels for halves in memory, from this number of channels of a group: the network's images,
# which are float32, have fewer.
_IN_HALVES, _LEAST_CHANNELS = ("pointwise_half", "implicit_gemm_prepacked_half"), 8


def convolve(
    target: Target, precision: str, builder: Builder, pending: Convolution, place: Value | None
) -> Value:
    """Emit a convolution, as `Lowering.convolve` documents."""
    onto, after = pending.onto, pending.after
    kernel, plan = _plan(target, precision, builder, pending.problem, onto is not None)
    stores = kernel.family.stores
    activates = after is None or kernel.family.activates(onto is not None)
    # The kernel writes images of the layer; `place` may be viewed as images of another shape.
    if place is not None and not (
        (place.dense or place.shape[:1] == (pending.problem.batch,))
        and (stores or place.dtype == "float32")
        and (onto is None and activates and kernel.family.spaced)
    ):
        return builder.compute(leaf(convolve(target, precision, builder, pending, None)), place)
    if onto is not None:
        onto = onto if stores else builder.single(onto)
        builder.drop(onto)
        y = replace(onto, shape=pending.shape)
    else:
        dtype = "" if stores else "float32"
        y = place or builder.empty(pending.shape, builder.constant(pending), dtype)
    defines: Defines = () if y.dense else (("OUT_IMAGE", f"{y.image}u"),)
    if after is not None and activates:
        text = statements(after, {id(pending.sums): "v"}, "v")
        defines = (*defines, ("ACTIVATE(v)", text))
    of_x = _prelude(pending.x, stores) if kernel.family.prelude else None
    if of_x is None:
        x = builder.dense(pending.x) if stores else builder.single(pending.x)
        of_x = Prelude(x, {}, ())
    defines = (*defines, *of_x.defines, *stored(of_x.x, y))
    y = _launched(builder, pending, plan, defines, of_x, y)
    if activates or after is None or pending.sums is None:
        return y
    return builder.value(Chain(pending.shape, substituted(after, pending.sums, leaf(y))))


def _launched(
    builder: Builder, pending: Convolution, plan: Plan, defines: Defines, of_x: Prelude, y: Value
) -> Value:
    """Emit a convolution's plan with further macros; preparation that depends only on weights
    runs once."""
    read = {"x": of_x.x, "w": pending.w, **of_x.arrays}
    if pending.bias is not None:
        read["bias"] = pending.bias
    apart = plan.apart
    if apart is not None and pending.w.constant and not of_x.x.constant:
        weights = of_x.added_to(replace(apart.weights, defines=(*plan.defines, *defines)))
        place = builder.empty((apart.nbytes // 4,), True)
        w = builder.claimed(pending.w)
        read["prepared"] = builder.emit(weights, place, {"w": w}, pending.node)
        plan = apart.images
    plan = of_x.added_to(replace(plan, defines=(*plan.defines, *defines), apart=None))
    # The array in the layer's own shape, so that `emit` checks all that the kernel writes.
    own = replace(y, shape=pending.problem.y_shape)
    made = builder.emit(plan, own, read, pending.node, pending.problem if pending.logged else None)
    return replace(made, shape=y.shape)


def _plan(
    target: Target, precision: str, builder: Builder, problem: ConvProblem, accumulate: bool
) -> tuple[Kernel, Plan]:
    """Return the best kernel for a convolution, and its plan."""
    batch = problem.batch
    if builder.chosen_for != builder.steps.images:
        batch = max(1, batch * builder.chosen_for // max(1, builder.steps.images))
    like = replace(problem, batch=batch)
    found = chosen(target, precision, problem, like, "forward", accumulate)
    if builder.storage == "float32" or problem.channels // problem.groups < _LEAST_CHANNELS:
        return found
    # A kernel for 1x1 layers; and one that, unlike others of its source, splits no numbers.
    pointwise, prepacked = map(catalog.get, _IN_HALVES)
    kernel = pointwise if pointwise.family.pays(problem, target.capability) else prepacked
    kept = found[0].family.stores and kernel is prepacked and found[0].source != kernel.source
    if kept or found[0].name == kernel.name or kernel.why_not(problem, target.capability):
        return found
    return kernel, kernel.plan(problem, target.capability, accumulate)


def chosen(
    target: Target,
    precision: str,
    problem: ConvProblem,
    like: ConvProblem,
    direction: str,
    accumulate: bool,
) -> tuple[Kernel, Plan]:
    """Return the best kernel for the problem `like`, and its plan for `problem`."""
    choice = tuned.best(like, target, precision, direction)
    plan = choice.kernel.plan(problem, target.capability, accumulate, choice.layout)
    if not plan.constants:
        return choice.kernel, plan
    # Constant memory belongs to a module, which several layers may use at the same time.
    kernel = catalog.default(like, direction, target.capability, precision)
    return kernel, kernel.plan(problem, target.capability, accumulate)


def stored(x: Value, y: Value | None = None) -> Defines:
    """Return the macros for the types of x and y, which is float32 if not given."""
    return stored_as(x.dtype, "float32" if y is None else y.dtype)


def stored_as(x: str, y: str) -> Defines:
    """Return the macros of stored.cuh for these types of x and y."""
    types = ("X_TYPE", x), ("Y_TYPE", y)
    halves = tuple((name, "__half") for name, dtype in types if dtype == "float16")
    return (("HALF", 1), *halves) if halves else ()


@dataclass(frozen=True)
class Prelude:
    """The input of a convolution: x, arrays with one element per channel, and the macros that
    define x's layout and how its elements are transformed."""

    x: Value
    arrays: Mapping[str, Value]
    defines: Defines

    def added_to(self, plan: Plan) -> Plan:
        """Return the plan with the arrays added to every launch."""
        if "CONVERT(v,c)" not in dict(self.defines):
            return plan
        launches = tuple(
            replace(launch, arguments=(*launch.arguments, *_PRELUDE)) for launch in plan.launches
        )
        return replace(plan, launches=launches)


# Additional arguments of kernels compiled with a PRELUDE.
_PRELUDE = ("factors", "addends")


def _prelude(operand: Value | Chain, stores: bool) -> Prelude | None:
    """Return the prelude for an array, or for a chain on one array and at most two others with one
    element per channel; `None` for other operands. The array may be float16 if the kernel `stores`
    that."""
    term = leaf(operand) if isinstance(operand, Value) else operand.term
    leaves = [each for each, _ in term.leaves()]
    of_channels = (1, operand.shape[1], *[1] * (len(operand.shape) - 2))
    # An image of one pixel, too, has one element per channel.
    x = next((each for each in leaves if each.shape == operand.shape), None)
    others = [each for each in leaves if each is not x]
    if x is None or x.value is None or len(others) > len(_PRELUDE):
        return None
    if any(each.shape != of_channels for each in others):
        return None
    types = ("float32", "float16") if stores else ("float32",)
    if x.value.dtype not in types:
        return None
    if any(each.value is not None and each.value.dtype != "float32" for each in others):
        return None
    value = x.value
    defines: Defines = () if value.dense else (("IN_IMAGE", f"{value.image}u"),)
    if term is not x:
        names = dict(zip(map(id, others), _PRELUDE))
        start = {id(x): "v", **{key: f"__ldg({name}+c)" for key, name in names.items()}}
        text = statements(term, start, "v")
        defines = (*defines, ("CONVERT(v,c)", text))
    arrays = {name: each.value for name, each in zip(_PRELUDE, others) if each.value is not None}
    return Prelude(value, arrays, defines)
