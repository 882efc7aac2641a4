"""A node of the compiled convolution, made and called as by MXNet with GPUs, without one."""

import ctypes

from ece408_op.operator import compiled_operator
from ece408_op.operator.conv_attributes import ConvAttributes

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
_TYPES = ("float32", "float64", "float16")
_POINTERS = ctypes.POINTER(ctypes.c_void_p)


def _library():
    return ctypes.CDLL(str(compiled_operator.LIBRARY))


def _creator(device):
    """Return the library's function that makes a node of `ece408_convolution` for a device."""
    library = _library()
    for number in range(library._opRegSize()):
        name = ctypes.c_char_p()
        devices, functions = ctypes.POINTER(ctypes.c_char_p)(), _POINTERS()
        count, unread = ctypes.c_int(), [ctypes.c_void_p() for _ in range(12)]
        library._opRegGet(
            *(number, ctypes.byref(name), *map(ctypes.byref, unread[:7])),
            *(ctypes.byref(devices), ctypes.byref(functions), ctypes.byref(count)),
            *map(ctypes.byref, unread[7:]),
        )
        if name.value == compiled_operator.NAME.encode():
            return dict(zip(devices[: count.value], functions[: count.value]))[device.encode()]
    raise LookupError(compiled_operator.NAME)


class LibraryNode:
    """One layer on the arrays of a problem. It is told that `stream` is MXNet's; `requests` are the
    bytes that it has requested of MXNet, which returns the address `workspace`, or 0 for none."""

    def __init__(self, attributes, problem, device="gpu", index=0, **more):
        self.stream, self.workspace, self.requests = 0x77, 0x5000, []
        layer = ConvAttributes.parse({name: str(value) for name, value in attributes.items()})
        given = {**compiled_operator.node_attributes(layer), **more}
        self._type = _TYPES.index(problem.dtype)
        self._device, self._index = device.encode(), index
        shapes = [problem.x_shape, problem.w_shape]
        if problem.bias:
            shapes.append(problem.bias_shape)
        self._in_shapes, self._out_shapes = shapes, [problem.y_shape]
        self._state = ctypes.c_void_p()
        self._malloc = _MALLOC(self._give)
        count = len(shapes)
        sizes = [(ctypes.c_uint * len(shape))(*shape) for shape in shapes]
        if not _library()._opCallCreateOpState(
            *(ctypes.c_void_p(_creator(device)), _texts(given), _texts(given.values())),
            *(len(given), self._device, index),
            (ctypes.POINTER(ctypes.c_uint) * count)(*(ctypes.cast(each, _UINTS) for each in sizes)),
            (ctypes.c_int * count)(*map(len, shapes)),
            *(count, (ctypes.c_int * count)(*[self._type] * count), ctypes.byref(self._state)),
        ):
            raise RuntimeError("the library refuses the node")

    def forward(self, inputs, output):
        """Run it; return whether it computed on arrays at these addresses."""
        nothing = [None] * 6
        stypes = (ctypes.c_int * 3)()
        return bool(
            _library()._opCallFStatefulCompute(
                *(1, self._state, *self._arrays(self._in_shapes, inputs)),
                *self._arrays(self._out_shapes, [output]),
                *(None, None, self._malloc, None, ctypes.c_void_p(self.stream), None, None),
                *(stypes, stypes, *nothing, None, None, None, None),
            )
        )

    def close(self):
        _library()._opCallDestroyOpState(self._state)

    def _give(self, _, nbytes):
        self.requests.append(nbytes)
        return self.workspace

    def _arrays(self, shapes, addresses):
        count = len(shapes)
        sizes = [(ctypes.c_int64 * len(shape))(*shape) for shape in shapes]
        return (
            (ctypes.POINTER(ctypes.c_int64) * count)(*(ctypes.cast(s, _INT64S) for s in sizes)),
            (ctypes.c_int * count)(*map(len, shapes)),
            (ctypes.c_void_p * count)(*addresses),
            (ctypes.c_int * count)(*[self._type] * count),
            (ctypes.c_size_t * count)(*[1] * count),
            (ctypes.c_char_p * count)(*[self._device] * count),
            (ctypes.c_int * count)(*[self._index] * count),
            count,
        )


_UINTS = ctypes.POINTER(ctypes.c_uint)
_INT64S = ctypes.POINTER(ctypes.c_int64)


def _texts(values):
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))
