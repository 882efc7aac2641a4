"""Convolutions with prepacked weights and with epilogues, on every instruction set of this CPU."""

import ctypes
import dataclasses

import numpy as np
from cases import every
from studies import guarded

from ece408_op.backends.cpu import native
from ece408_op.problem import ConvProblem

# Planes of a vector or two.
SINGLE_TAPS = (
    *("b2,c40,h7,w7,m100,k1", "b1,c600,h5,w9,m13,k1,bias", "b3,c5,h23,w21,m14,k1,s2x2"),
    *("b2,c5,h4,w4,m9,k1", "b1,c7,h1,w17,m5,k1,bias"),
    # Planes of vectors and odd pixels.
    *("b1,c300,h7,w7,m96,k1,bias", "b2,c20,h14,w14,m24,k1", "b1,c9,h33,w34,m16,k1,s2x2"),
)
OTHERS = ("b2,c3,h20,w33,m7,k3", "b1,c1,h64,w80,m5,k5,p2x2")
DEPTHWISE = (
    *("b2,c6,h17,w19,m6,k3,p1x1,g6,bias", "b2,c6,h7,w7,m12,k3,s2x2,p1x1,g6"),
    "b1,c3,h3,w4,m3,k3,g3",
)
FILTERS = (
    ("conv_fwd_oc", "b2,c9,h13,w20,m23,k3,s2x2,p1x1,bias"),
    ("conv_fwd_oc", "b1,c8,h7,w7,m66,k3,p1x1,d2x2,g2"),
    ("conv_fwd_oc", "b5,c16,h5,w6,m64,k3,p1x1"),
    ("conv_fwd_oc_f23_1d", "b2,c9,h13,w20,m23,k3,p1x1,bias"),
    ("conv_fwd_oc_f23_1d", "b3,c40,h7,w7,m40,k5x3,p2x1"),
    ("conv_fwd_oc_f23_1d", "b1,c64,h24,w25,m64,k3,p1x1"),
    ("conv_fwd_oc_f23_1d", "b2,c40,h6,w17,m40,k1x7,p0x3,bias"),
    ("conv_fwd_oc_f23_2d", "b2,c9,h13,w20,m23,k3,p1x1,bias"),
    ("conv_fwd_oc_f23_2d", "b3,c40,h7,w7,m40,k5x3,p2x1"),
    ("conv_fwd_oc_f23_2d", "b1,c64,h24,w25,m64,k3,p1x1"),
    ("conv_fwd_oc_f23_2d", "b2,c9,h13,w19,m23,k3,p2x2,d2x2,bias"),
    ("conv_fwd_oc_f23_1d", "b2,c5,h29,w24,m23,k7x4,s2x2,p3x1,bias"),
    ("conv_fwd_oc_f23_1d", "b1,c9,h23,w20,m23,k3x3,p2x2,d4x2"),
)
# For each kernel with an epilogue, layers that it computes; the chosen one for `None`.
FINISHED = (*((None, text) for text in (*SINGLE_TAPS, *OTHERS, *DEPTHWISE)), *FILTERS)
UNSUPPORTED = 2


class _Finish(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("factors", "addends", "added")],
        *[(name, ctypes.c_float) for name in ("lowest", "highest")],
    ]


def _arrays(problem, rng):
    """Return x, w, bias, factors and addends, and the array to add: small whole numbers."""
    filters = (problem.filters,)
    shapes = (problem.x_shape, problem.w_shape, filters, filters, filters, problem.y_shape)
    x, w, bias, *others = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
    return x, w, bias if problem.bias else None, *others


def _address(array):
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def _number(kernel):
    return -1 if kernel is None else native.kernels().index(kernel)


def _finished(problem, arrays, bounds, threads, isa, kernel=None):
    """Return the status, and y, with prepacked weights if the kernel, or the chosen one, supports
    them. Arrays end at forbidden memory."""
    x, w, bias, *others = [
        None if array is None else guarded.place(array, "end", read_only=True) for array in arrays
    ]
    y = guarded.place(np.full(problem.y_shape, np.nan, np.float32), "end")
    finish = _Finish(*map(_address, others), *bounds)
    number = _number(kernel)
    packed = _packed(problem, w, bias, isa, number)
    return _forward(problem, x, w, bias, packed, finish, y, threads, isa, number), y


def _packed(problem, w, bias, isa, kernel=-1):
    """Return the packed weights and biases; `None` if the kernel, or the chosen one, packs none."""
    library, code = native.library(), native.ISA_CODES[isa]
    library.ece408_packed_floats.restype = ctypes.c_int64
    given = ctypes.byref(native.as_struct(problem))
    floats = library.ece408_packed_floats(given, code, kernel)
    packed = guarded.place(np.full(max(floats, 1), np.nan, np.float32), "end")
    arrays = map(_address, (w, bias, packed))
    status = library.ece408_pack(given, *arrays, 2, code, kernel)
    assert status in (0, UNSUPPORTED)
    assert floats > 0 or status == UNSUPPORTED
    return None if status else packed


def _forward(problem, x, w, bias, packed, finish, y, threads, isa, kernel=-1):
    return native.library().ece408_forward_packed(
        ctypes.byref(native.as_struct(problem)),
        *map(_address, (x, w, bias, packed)),
        ctypes.byref(finish) if finish else None,
        *(_address(y), threads, native.ISA_CODES[isa], kernel),
    )


def _expected(problem, arrays, bounds):
    x, w, bias, factors, addends, added = arrays
    y = np.empty(problem.y_shape, np.float32)
    addresses = [None if a is None else a.ctypes.data for a in (x, w, bias, y)]
    native.run("reference_forward", problem, *addresses, accumulate=False, threads=1)
    each = (None, slice(None), None, None)
    with np.errstate(invalid="ignore"):
        y = y * factors[each] + addends[each] + (0 if added is None else added)
    return np.clip(y, *bounds)


@every(way=[(1, False), (3, False), (2, True)], layer=FINISHED, bounds=[(0, 6), (-np.inf, np.inf)])
def test_whole_numbers_are_exact_and_others_are_in_their_places(isa, layer, way, bounds, rng):
    (threads, is_special), (kernel, text) = way, layer
    problem = ConvProblem.parse(text)
    arrays = _arrays(problem, rng)
    for value in (np.inf, -np.inf, np.nan) if is_special and text not in OTHERS else ():
        arrays[0].flat[rng.integers(arrays[0].size)] = value
    for given in (arrays, (*arrays[:-1], None)):
        status, y = _finished(problem, given, bounds, threads, isa, kernel)
        if text in DEPTHWISE and given[-1] is not None:
            assert status == UNSUPPORTED
            assert np.isnan(y).all()
        else:
            assert status == 0
            np.testing.assert_array_equal(y, _expected(problem, given, bounds))


def test_other_kernels_and_weights_leave_it_to_the_caller(isa, rng):
    problem = ConvProblem.parse(DEPTHWISE[0])
    arrays = (*_arrays(problem, rng)[:-1], None)
    arrays[1].flat[0] = np.inf
    assert _finished(problem, arrays, (0, 6), 2, isa)[0] == UNSUPPORTED
    problem = ConvProblem.parse("b1,c3,h12,w9,m5,k5")
    arrays = _arrays(problem, rng)
    assert _finished(problem, arrays, (0, 6), 2, isa, "winograd")[0] == UNSUPPORTED


# For each kernel that packs weights, layers that it can compute.
PACKED = [
    *[("direct", text) for text in (*SINGLE_TAPS, *OTHERS)],
    ("winograd", "b2,c9,h13,w20,m23,k3,p1x1,bias"),
    ("winograd", "b1,c3,h12,w9,m5,k5"),
    *FILTERS,
]


@every(threads=[1, 3], layer=PACKED)
def test_packed_weights_give_the_same_bits(isa, layer, threads, rng):
    """The weights were packed for another number and size of images."""
    kernel, text = layer
    problem = ConvProblem.parse(text)
    number = _number(kernel)
    arrays = (rng.standard_normal(shape) for shape in (problem.x_shape, problem.w_shape))
    x, w = (guarded.place(a.astype(np.float32), "end", read_only=True) for a in arrays)
    bias = rng.standard_normal(problem.filters).astype(np.float32) if problem.bias else None
    expected, found = np.empty((2, *problem.y_shape), np.float32)
    addresses = [None if a is None else a.ctypes.data for a in (x, w, bias, expected)]
    code = native.ISA_CODES[isa]
    given = ctypes.byref(native.as_struct(problem))
    assert native.library().ece408_forward_f32(given, *addresses, 0, threads, code, number) == 0
    other = dataclasses.replace(
        problem, batch=problem.batch + 3, height=problem.height + 4, width=problem.width + 8
    )
    packed = _packed(other, w, bias, isa, number)
    assert packed is not None
    assert _forward(problem, x, w, bias, packed, None, found, threads, isa, number) == 0
    np.testing.assert_array_equal(found, expected)


def test_weights_that_are_not_packed(isa, rng):
    for text, value in (
        (DEPTHWISE[0], 1),
        ("b1,c3,h9,w9,m2,k3,s3x3", 1),
        # `direct` would multiply the zeros of its border.
        ("b1,c1,h64,w80,m5,k5,p2x2", np.inf),
    ):
        problem = ConvProblem.parse(text)
        w = np.full(problem.w_shape, value, np.float32)
        number = _number(None if value == 1 else "direct")
        assert _packed(problem, w, None, isa, number) is None
