"""Work of one call, by the roles of its arrays; used by staging and zero-copy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...errors import InvalidSetting, UnsupportedProblem
from ...op_log import GpuTime
from ...problem import ITEM_BYTES, PRECISIONS, ConvProblem
from .. import Done, kernel_file
from .kernel_plan import Capability, Kernel, Layout, Plan, Target
from .kernels import catalog, tuned

# Arrays with a batch axis; the others are shared by the whole batch.
OVER_BATCH = ("x", "y", "dx", "dy")


@dataclass(frozen=True)
class Step:
    """One direction to compute; with `accumulate` its result is added to the output."""

    direction: str
    accumulate: bool


@dataclass(frozen=True)
class Work:
    """The steps of one call on the arrays at `addresses`, by role: "x", "w", "bias", "y" and their
    gradients "dx", "dw", "dbias", "dy".

    `outputs` are the roles that are written. `kernel` names the kernel of the forward pass; `None`
    selects the best one that is at least as exact as `precision`. Kernels of gradients are always
    selected so.
    """

    problem: ConvProblem
    steps: tuple[Step, ...]
    addresses: Mapping[str, int]
    outputs: tuple[str, ...]
    kernel: str | None = None
    precision: str = "float32"

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """The roles that are read, including outputs that are accumulated per image."""
        added = any(step.accumulate for step in self.steps)
        return tuple(
            role
            for role in self.addresses
            if role not in self.outputs or (added and role in OVER_BATCH)
        )

    def nbytes(self, role: str, images: int) -> int:
        """Return the size of an array in bytes, for a batch of `images`."""
        return images * self._sizes[role] if role in OVER_BATCH else self._sizes[role]

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes per array; per image for those with a batch axis."""
        item = ITEM_BYTES[self.problem.dtype]
        return {
            role: item * math.prod(shape_of(self.problem, role)[role in OVER_BATCH :])
            for role in self.addresses
        }

    def plans(self, gpu: Target, images: int) -> list[Plan]:
        """Return how to compute each step for a batch of `images` on this GPU.

        Raises `InvalidSetting` and `UnsupportedProblem`.
        """
        key = (id(gpu), images)
        if key not in self._plans:
            problem = _of_images(self.problem, images)
            self._plans[key] = [self._plan(problem, step, gpu) for step in self.steps]
        return self._plans[key]

    @functools.cached_property
    def _plans(self) -> dict[tuple[int, int], list[Plan]]:
        """Plans by GPU and images, as a call requests them repeatedly."""
        return {}

    def _plan(self, problem: ConvProblem, step: Step, gpu: Target) -> Plan:
        name, layout = self._choice(problem, step.direction, gpu)
        return plan(problem, step.direction, gpu.capability, step.accumulate, name, layout)

    def _choice(
        self, problem: ConvProblem, direction: str, gpu: Target
    ) -> tuple[str, Layout | None]:
        """Return a kernel's name and its layout (`None`: the kernel's own choice)."""
        if self.kernel is not None and direction == "forward":
            layout = None
            if kernel_file.device_of(self.kernel) is not None:
                layout = tuned.layout_of(forward_kernel(self.kernel), problem, gpu)
            return self.kernel, layout
        best = tuned.best(problem, gpu, self.precision, direction)
        return best.kernel.name, best.layout


# Creating a problem, which is validated, takes 25 us, and each call creates several.
@functools.lru_cache(maxsize=4096)
def _of_images(problem: ConvProblem, images: int) -> ConvProblem:
    return dataclasses.replace(problem, batch=images)


def done(time: GpuTime | None, plans: Iterable[Plan]) -> Done:
    """Return the summary of a call: busy time of the GPUs and the plans that ran, which may differ
    for parts of the batch. The precision is that of the least exact plan."""
    kernels = list(dict.fromkeys(each.kernel for each in plans))
    names = "+".join(dict.fromkeys(each.name for each in kernels))
    return Done(names, max((each.precision for each in kernels), key=PRECISIONS.index), time)


def forward(
    problem: ConvProblem,
    x: int,
    w: int,
    bias: int | None,
    y: int,
    accumulate: bool,
    kernel: str | None = None,
    precision: str = "float32",
) -> Work:
    """Return the work of the forward pass."""
    addresses = {"x": x, "w": w, "y": y}
    if bias is not None:
        addresses["bias"] = bias
    steps = (Step("forward", accumulate),)
    return Work(problem, steps, addresses, ("y",), kernel, precision)


def backward_data(
    problem: ConvProblem,
    w: int,
    dy: int,
    dx: int,
    accumulate: bool,
    precision: str = "float32",
) -> Work:
    """Return the work of the gradient for x."""
    addresses = {"w": w, "dy": dy, "dx": dx}
    steps = (Step("backward_data", accumulate),)
    return Work(problem, steps, addresses, ("dx",), precision=precision)


def backward_weight(
    problem: ConvProblem,
    x: int,
    dy: int,
    dw: int | None,
    dbias: int | None,
    accumulate_w: bool,
    accumulate_bias: bool,
    precision: str = "float32",
) -> Work:
    """Return the work of the gradients for w and the bias, each unless it is `None`."""
    addresses, steps = {"dy": dy}, []
    if dw is not None:
        addresses |= {"x": x, "dw": dw}
        steps.append(Step("backward_weight", accumulate_w))
    if dbias is not None:
        addresses["dbias"] = dbias
        steps.append(Step("backward_bias", accumulate_bias))
    outputs = tuple(role for role in ("dw", "dbias") if role in addresses)
    return Work(problem, tuple(steps), addresses, outputs, precision=precision)


def example(
    problem: ConvProblem, direction: str, kernel: str | None = None, precision: str = "float32"
) -> Work:
    """Return the work of one direction without arrays, for preparation."""
    bias = 0 if problem.bias else None
    if direction == "forward":
        return forward(problem, 0, 0, bias, 0, False, kernel, precision)
    if direction == "backward_data":
        return backward_data(problem, 0, 0, 0, False, precision)
    return backward_weight(problem, 0, 0, 0, bias, False, False, precision)


def shape_of(problem: ConvProblem, role: str) -> tuple[int, ...]:
    """Return the shape of the array in a role; a gradient has the shape of its array."""
    shapes = {
        "x": problem.x_shape,
        "y": problem.y_shape,
        "w": problem.w_shape,
        "bias": problem.bias_shape,
    }
    return shapes[role[1:] if role.startswith("d") else role]


def rejection(
    problem: ConvProblem, direction: str, capability: Capability, kernel: str
) -> str | None:
    """Return why this forward kernel cannot compute the problem, or `None` if it can."""
    if direction != "forward":
        return None
    return _rejection(forward_kernel(kernel), problem, capability)


def _rejection(kernel: Kernel, problem: ConvProblem, capability: Capability) -> str | None:
    reason = _why_not(kernel, problem, capability)
    return None if reason is None else f"kernel {kernel.name}: {reason}"


def plan(
    problem: ConvProblem,
    direction: str,
    capability: Capability,
    accumulate: bool,
    kernel: str,
    layout: Layout | None = None,
) -> Plan:
    """Return how the kernel of this name computes one direction, with this layout or its own
    choice.

    Raises `InvalidSetting` for an unknown name, and `UnsupportedProblem` if the kernel cannot
    compute this.
    """
    chosen = forward_kernel(kernel) if direction == "forward" else catalog.get(kernel)
    reason = _rejection(chosen, problem, capability)
    if reason is not None:
        raise UnsupportedProblem(
            f"cannot compute {direction} of {problem}; {reason}; without --kernel (ECE408_KERNEL) "
            "the best one is chosen"
        )
    return _plan_of(chosen, problem, capability, accumulate, layout)


# Cached because every call uses it, and some families take milliseconds.
@functools.lru_cache(maxsize=4096)
def _why_not(kernel: Kernel, problem: ConvProblem, capability: Capability) -> str | None:
    return kernel.why_not(problem, capability)


@functools.lru_cache(maxsize=4096)
def _plan_of(
    kernel: Kernel,
    problem: ConvProblem,
    capability: Capability,
    accumulate: bool,
    layout: Layout | None,
) -> Plan:
    return kernel.plan(problem, capability, accumulate, layout)


def forward_kernel(name: str) -> Kernel:
    """Return the kernel of this name. Raises `InvalidSetting` unless it is a forward kernel."""
    kernel = catalog.get(name)
    if kernel.direction != "forward":
        names = ", ".join(each.name for each in catalog.KERNELS if each.direction == "forward")
        raise InvalidSetting(f"kernel {name} is for gradients; choose one of {names}")
    return kernel
