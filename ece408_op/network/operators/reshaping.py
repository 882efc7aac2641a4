"""Operators that move elements or change shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...errors import UnsupportedProblem
from ..builder import Builder, Operand, Room
from ..graph import Node
from ..host_arrays import ITEM_BYTES
from ..node_attributes import Attributes
from ..values import Value
from .operator import Operator, axis_of, check_planes


def _flatten(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    shape = operands[0].shape
    return builder.view(operands[0], (shape[0], math.prod(shape[1:])))


def _reshape_why_not(attributes: Attributes) -> str | None:
    if attributes.flag("reverse"):
        return "reverse is not computed"
    return None if attributes.is_set("shape") else "only the attribute shape is computed"


def _reshape(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    old, codes = operands[0].shape, attributes.integers("shape")
    try:
        shape = reshaped(old, codes)
    except IndexError:
        # A chunk of one image has fewer axes after `squeeze`.
        message = f"{builder.node}: {old} cannot be reshaped by {codes}"
        raise UnsupportedProblem(message) from None
    if math.prod(shape) != math.prod(old):
        raise UnsupportedProblem(f"{builder.node}: {old} cannot be reshaped to {shape}")
    return builder.view(operands[0], shape)


def reshaped(old: Sequence[int], codes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that MXNet's codes make of `old`: 0 keeps an axis, -1 is inferred, -2 keeps
    all axes that follow, -3 merges two, -4 splits one into the next two."""
    new: list[int] = []
    at, i = 0, 0
    while i < len(codes):
        code = codes[i]
        if code == -2:
            new += old[at:]
            at = len(old)
        elif code == -3:
            new.append(old[at] * old[at + 1])
            at += 2
        elif code == -4:
            first, second = codes[i + 1 : i + 3]
            first = old[at] // second if first == -1 else first
            new += [first, old[at] // first if second == -1 else second]
            at, i = at + 1, i + 2
        else:
            new.append(old[at] if code == 0 else code)
            at += 1
        i += 1
    if -1 in new:
        rest = math.prod(size for size in new if size != -1)
        new[new.index(-1)] = math.prod(old) // max(1, rest)
    return tuple(new)


def _expand(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    shape = list(operands[0].shape)
    shape.insert(axis_of(attributes.integer("axis"), len(shape) + 1), 1)
    return builder.view(operands[0], shape)


def _squeeze(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    shape = operands[0].shape
    given = attributes.integers("axis", ())
    axes = {axis_of(axis, len(shape)) for axis in given} if given else set(range(len(shape)))
    if 0 in axes:
        # A chunk of one image would lose an axis that the whole batch keeps.
        builder.mixes_images()
    kept = [size for axis, size in enumerate(shape) if size != 1 or axis not in axes]
    return builder.view(operands[0], kept or [1])


def _transpose(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x = builder.dense(operands[0])
    named = attributes.integers("axes", ()) or tuple(reversed(range(len(x.shape))))
    axes = tuple(axis_of(axis, len(x.shape)) for axis in named)
    if axes[0] != 0:
        builder.mixes_images()
    return builder.transposed(x, axes)


def _swap_axes(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    count = len(operands[0].shape)
    axes = list(range(count))
    first, second = (axis_of(attributes.integer(f"dim{k}", 0), count) for k in (1, 2))
    axes[first], axes[second] = axes[second], axes[first]
    return _transpose(builder, Attributes("transpose", {"axes": str(tuple(axes))}), operands)


def _pad(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x = builder.dense(operands[0])
    widths = attributes.integers("pad_width")
    before, after = widths[::2], widths[1::2]
    shape = [a + size + b for a, size, b in zip(before, x.shape, after)]
    border = attributes.text("mode", "constant"), attributes.number("constant_value", 0.0)
    return builder.windowed(x, shape, before, border)


def _slice_axis(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x = builder.dense(operands[0])
    axis = axis_of(attributes.integer("axis"), len(x.shape))
    size = x.shape[axis]
    begin, end = attributes.integer("begin"), attributes.integer("end", size)
    begin, end = (place + size if place < 0 else place for place in (begin, end))
    if axis == 0:
        builder.mixes_images()
    return builder.part(x, axis, begin, min(end, size) - begin)


def _slice_like(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x, like = builder.dense(operands[0]), operands[1].shape
    axes = attributes.integers("axes", ()) or tuple(range(len(x.shape)))
    shape = list(x.shape)
    for axis in axes:
        axis = axis_of(axis, len(shape))
        axis_of(axis, len(like))
        if like[axis] > shape[axis]:
            raise UnsupportedProblem(f"{builder.node}: {x.shape} has nothing of shape {like}")
        shape[axis] = like[axis]
        if axis == 0:
            builder.mixes_images()
    builder.drop(operands[1])
    return builder.windowed(x, shape, [0] * len(shape))


def _broadcast_like(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    x, like = builder.dense(operands[0]), operands[1].shape
    mine, other = (attributes.integers(name, ()) for name in ("lhs_axes", "rhs_axes"))
    shape = list(x.shape)
    every = range(len(shape))
    if not mine and len(like) != len(shape):
        raise UnsupportedProblem(f"{builder.node}: {x.shape} does not spread to {like}")
    for axis, of in zip(mine or every, other or every):
        shape[axis_of(axis, len(shape))] = like[axis_of(of, len(like))]
    if any(a not in (1, b) for a, b in zip(x.shape, shape)):
        raise UnsupportedProblem(f"{builder.node}: {x.shape} does not spread to {tuple(shape)}")
    if shape[0] != x.shape[0]:
        builder.mixes_images()
    builder.drop(operands[1])
    return builder.spread(x, shape)


def _reshape_like(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    parts = []
    for side, operand in zip(("lhs", "rhs"), operands):
        axes = len(operand.shape)
        begin, end = (
            attributes.integer(f"{side}_{name}", default)
            for name, default in (("begin", 0), ("end", axes))
        )
        places = [place + axes if place < 0 else place for place in (begin, end)]
        parts.append(slice(*places))
    old, like = operands[0].shape, operands[1].shape
    shape = (*old[: parts[0].start], *like[parts[1]], *old[parts[0].stop :])
    if math.prod(shape) != math.prod(old):
        raise UnsupportedProblem(f"{builder.node}: {old} cannot be reshaped to {shape}")
    builder.drop(operands[1])
    return builder.view(operands[0], shape)


def _split(builder: Builder, attributes: Attributes, operands: list[Operand]) -> list[Operand]:
    """Split the operand; parts along channels are views, others are copies."""
    x = builder.dense(operands[0])
    axis = axis_of(attributes.integer("axis", 1), len(x.shape))
    parts = attributes.integer("num_outputs")
    if x.shape[axis] % parts:
        raise UnsupportedProblem(f"{builder.node}: {x.shape} has no {parts} equal parts")
    if axis == 0:
        builder.mixes_images()
    size = x.shape[axis] // parts
    found = [builder.part(builder.claimed(x), axis, k * size, size) for k in range(parts)]
    builder.drop(x)
    if not attributes.flag("squeeze_axis"):
        return [*found]
    return [each.seen((*each.shape[:axis], *each.shape[axis + 1 :]), each.image) for each in found]


def _upsampling_why_not(attributes: Attributes) -> str | None:
    if attributes.text("sample_type", "nearest") != "nearest":
        return "sample_type bilinear is not computed"
    return None if attributes.integer("num_args", 1) == 1 else "only one input is scaled"


def _upsampling(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Repeat each pixel vertically and horizontally."""
    check_planes(builder.node, operands[0])
    x = builder.dense(operands[0])
    images, channels, height, width = x.shape
    scale = attributes.integer("scale")
    pixels = x.seen((images * channels, height, 1, width, 1))
    made = builder.spread(pixels, (images * channels, height, scale, width, scale))
    return made.seen((images, channels, height * scale, width * scale))


def _resize_why_not(attributes: Attributes) -> str | None:
    mode = attributes.text("mode", "size")
    if mode != "size":
        return f"mode {mode} is not computed; only size is"
    scaled = [name for name in ("scale_height", "scale_width") if attributes.is_set(name)]
    return f"{scaled[0]} is not computed; only height and width are" if scaled else None


def _resize(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    check_planes(builder.node, operands[0])
    x = builder.dense(operands[0])
    height, width = (attributes.integer(name, 1) for name in ("height", "width"))
    y = builder.empty((*x.shape[:2], height, width), x.constant)
    plan = builder.lowering.resize(x, y, attributes.flag("align_corners", True))
    return builder.emit(plan, y, {"x": x})


def _concat(builder: Builder, attributes: Attributes, operands: list[Operand]) -> Operand:
    """Compute each operand directly into its place in the result; the first may already be in
    place."""
    shapes = [each.shape for each in operands]
    axis = axis_of(attributes.once(_dim), len(shapes[0]))
    # In a chunk of images: a parameter with one row per image of the whole batch, or another number
    # of axes after `squeeze`.
    if len({(len(each), *each[:axis], *each[axis + 1 :]) for each in shapes}) > 1:
        raise UnsupportedProblem(f"{builder.node}: {shapes} differ not only in axis {axis}")
    sizes = [each[axis] for each in shapes]
    shape = list(shapes[0])
    shape[axis] = sum(sizes)
    if axis == 0:
        builder.mixes_images()
    after = math.prod(shape[axis + 1 :])
    rows = math.prod(shape[:axis])
    begun = operands[0]
    goes_on = builder.number in builder.room.goes_on
    if goes_on and isinstance(begun, Value) and begun.image:
        whole = begun.seen(tuple(shape), begun.image)
        builder.drop(begun)
        first = 1
    else:
        whole = _place(builder, operands, shape)
        first = 0
    image = whole.image or shape[axis] * after
    for k, each in enumerate(operands[first:], first):
        part = each.shape[axis] * after
        seen = each if axis == 1 else builder.view(builder.dense(each), (rows, part))
        offset = ITEM_BYTES[whole.dtype] * sum(sizes[:k]) * after
        builder.into(seen, whole.seen(seen.shape, image, offset))
    return builder.claimed(whole)


def _place(builder: Builder, operands: Sequence[Operand], shape: Sequence[int]) -> Value:
    """Return the array to concatenate into, with room for known later additions."""
    constant = all(builder.constant(each) for each in operands)
    channels = builder.room.channels.get(builder.number, 0)
    if constant or not channels:
        return builder.empty(shape, constant)
    after = math.prod(shape[2:])
    whole = builder.empty((shape[0], channels, *shape[2:]), False)
    return whole.seen(tuple(shape), channels * after)


def room(nodes: Sequence[Node], found: Mapping[int, tuple[int, ...]]) -> Room:
    """Find concatenations of channels that extend another one, which begins no third; `found` has
    the shapes of results."""
    begun: dict[int, list[int]] = {}
    for k, node in enumerate(nodes):
        if _joins_channels(node) and _joins_channels(nodes[node.inputs[0].node]):
            begun.setdefault(node.inputs[0].node, []).append(k)
    room = Room()
    for k in sorted(begun, reverse=True):
        if len(begun[k]) == 1:
            (following,) = begun[k]
            room.channels[k] = room.channels.get(following, found[following][1])
            room.goes_on.add(following)
    return room


def _joins_channels(node: Node) -> bool:
    return node.op in ("Concat", "concat") and node.read.once(_dim) == 1


def _dim(attributes: Attributes) -> int:
    return attributes.integer("dim", 1)


OPERATORS = {
    **dict.fromkeys(("Flatten", "flatten"), Operator(_flatten)),
    **dict.fromkeys(("Reshape", "reshape"), Operator(_reshape, _reshape_why_not)),
    "expand_dims": Operator(_expand),
    "squeeze": Operator(_squeeze),
    "transpose": Operator(_transpose),
    **dict.fromkeys(("SwapAxis", "swapaxes"), Operator(_swap_axes)),
    **dict.fromkeys(("Pad", "pad"), Operator(_pad)),
    "slice_axis": Operator(_slice_axis),
    "slice_like": Operator(_slice_like),
    "broadcast_like": Operator(_broadcast_like),
    "reshape_like": Operator(_reshape_like),
    **dict.fromkeys(("SliceChannel", "split"), Operator(_split)),
    "UpSampling": Operator(_upsampling, _upsampling_why_not),
    "_contrib_BilinearResize2D": Operator(_resize, _resize_why_not),
    **dict.fromkeys(("Concat", "concat"), Operator(_concat)),
}
