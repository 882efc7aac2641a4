"""The general CPU kernels against a NumPy oracle: every direction, dtype, instruction set.

Arrays end at forbidden pages (`guarded`); outputs hold NaN initially.
"""

import math

import numpy as np
import pytest
from cases import every
from harness import DIRECTIONS, check_exact, placed, run

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.bench import oracle
from ece408_op.host.footprint import available_bytes
from ece408_op.problem import ITEM_BYTES, ConvProblem

PROBLEMS = [
    *("b1,c1,h1,w1,m1,k1", "b2,c3,h9,w11,m4,k3x3,s2x3,bias", "b5,c2,h6,w7,m3,k3x3,p1x2"),
    *("b2,c2,h3,w3,m9,k3x3,p4x3,bias", "b1,c2,h12,w11,m3,k3x2,d3x4"),
    *("b3,c3,h13,w14,m17,k3x4,s2x3,p2x1,d2x3,bias", "b2,c6,h7,w8,m4,k1x5,p0x2,g2"),
    *("b4,c5,h20,w35,m5,k3x3,p1x1,g5,bias", "b2,c4,h9,w7,m8,k2x1,s3x2,p2x2,d2x1,g4"),
    *("b1,c2,h50,w60,m3,k7x7,s4x5,p3x0", "b1,c300,h5,w6,m9,k1x1,p1x1"),
    # Many filters or channels: vectorised over output channels.
    *("b3,c14,h9,w17,m37,k3x3,s2x2,p1x1,bias", "b2,c40,h8,w15,m50,k2x3,s3x2,p2x1,d2x1,g2"),
    *("b5,c16,h7,w7,m33,k3x3,p1x1", "b1,c70,h6,w30,m20,k1x2,d1x3,bias"),
    *("b1,c30,h5,w5,m20,k3x3,s2x1,p4x3", "b2,c17,h11,w10,m64,k2x2,s3x3"),
    *("b9,c16,h2,w3,m16,k2x2,p3x2", "b2,c20,h20,w300,m16,k3x3,p1x1"),
    *("b3,c40,h13,w12,m30,k5x3,p2x1,d1x2,bias", "b2,c18,h21,w30,m33,k1x1,s2x3,bias"),
    # Winograd F(2,3) along rows.
    *("b2,c9,h41,w38,m23,k7x7,s2x2,p3x3,bias", "b1,c14,h43,w40,m35,k11x3,s4x3,p2x1"),
    *("b2,c9,h40,w37,m20,k5x4,s3x4,p1x2", "b2,c30,h19,w22,m33,k3x3,p3x2,d3x2,bias"),
    "b1,c33,h17,w14,m36,k4x4,p2x1",
    # In two dimensions with dilation.
    "b2,c20,h13,w11,m33,k3x3,p2x2,d2x2",
    "b1,c18,h14,w26,m19,k5x3,p3x2,d3x2,bias",
    # Along columns.
    *("b2,c20,h5,w17,m33,k1x7,p0x3", "b3,c34,h9,w20,m38,k1x4,p0x1,g2,bias"),
    "b1,c90,h3,w6,m16,k1x3",
    # Batches whose weight gradients are summed in splits.
    "b21,c3,h6,w7,m4,k3x3,p1x1",
    "b35,c3,h6,w7,m12,k3x3,s2x1",
    # Weight gradients vectorised over input channels.
    *("b3,c40,h17,w15,m30,k1x7,p0x3", "b2,c70,h13,w11,m29,k3x3,s2x2,p1x1,d1x2"),
    *("b7,c33,h5,w7,m19,k3x3,p1x1", "b2,c36,h21,w35,m33,k1x1,s2x3", "b3,c40,h4,w2,m20,k1x1,s1x3"),
    # 1x1 kernels on planes of whole vectors, read in place; the last planes are pages apart.
    *("b2,c13,h40,w60,m9,k1x1", "b33,c7,h8,w6,m50,k1x1", "b7,c22,h16,w5,m14,k1x1,g2"),
    "b2,c9,h32,w32,m10,k1x1",
    # Only one row of x is read, of planes that would be whole vectors.
    "b3,c11,h2,w24,m7,k1x1,s3x1",
    # Weight gradients by Winograd F(3,2) along rows.
    "b2,c18,h21,w20,m19,k3x3,p1x1",
    "b5,c16,h13,w11,m16,k3x2,p0x1,d1x2,g2",
    # With strides: phases of three rows and two, four and three, three; columns without taps.
    *("b3,c3,h57,w61,m19,k11x11,s4x4,p2x2", "b3,c5,h41,w38,m23,k7x7,s2x2,p3x3"),
    *("b5,c7,h40,w23,m50,k6x2,s2x4", "b6,c6,h24,w21,m30,k5x3,s2x1,p1x1,d1x2"),
    # Small planes in groups of one channel.
    "b9,c40,h7,w7,m40,k3x3,p1x1,g40",
    "b20,c33,h9,w13,m66,k5x5,p2x2,g33",
    # Small planes in other groups.
    *("b3,c33,h31,w45,m33,k3x3,s2x2,p1x1,g33", "b2,c32,h70,w37,m64,k3x3,p0x2,g32"),
    *("b2,c34,h19,w21,m34,k5x5,s2x2,p4x1,g34", "b1,c32,h20,w150,m32,k5x5,p2x2,g32"),
    # Windows that overlap little, or cover nearly all of the image: im2col.
    *("b3,c3,h29,w31,m17,k5x7,s5x7,bias", "b2,c4,h40,w38,m6,k3x9,s4x8,p1x2,d2x1,g2"),
    *("b5,c2,h12,w13,m5,k12x11,p0x1,bias", "b40,c3,h6,w5,m33,k6x5"),
    *("b70,c34,h1,w1,m42,k1x1,g2,bias", "b1,c2,h1,w700,m9,k1x100,s1x10,p0x3"),
    # A single image, whose rows are divided among threads.
    "b1,c3,h97,w41,m20,k5x5,s3x3,p2x2",
    # Padded rows of a vector and more, for which the image is copied with its border.
    *("b1,c3,h9,w33,m5,k3x3,p1x1,bias", "b9,c2,h7,w29,m13,k5x4,p3x2"),
    "b3,c1,h6,w40,m30,k3x1,p5x0,bias",
]
cpu, strict = CpuBackend(), CpuBackend("strict", "strict")


@every(text=PROBLEMS, dtype=ITEM_BYTES)
def test_every_direction_is_exact_on_whole_numbers(dtype, text, rng):
    problem = ConvProblem.parse(f"{text},{dtype}" if dtype != "float32" else text)
    check_exact(cpu, problem, rng, native.isas())


@every(text=PROBLEMS)
def test_strict_is_exact_on_whole_numbers(text, rng):
    check_exact(strict, ConvProblem.parse(text), rng, native.isas())


@every(size=range(1, 20))
def test_narrow_images_and_few_filters(size, rng):
    problem = ConvProblem(2, 2, size, 20 - size, size, (3, 3), pad=(1, 1))
    check_exact(cpu, problem, rng, native.isas(), [(False, "end")])


def _real(problem, rng):
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    return [rng.standard_normal(shape).astype(problem.dtype) for shape in shapes]


THREADED = [
    *("b7,c5,h20,w23,m9,k3,p1x1", "b1,c4,h60,w61,m6,k3,s2x2,g2"),
    *("b5,c3,h35,w42,m20,k7,s7x7", "b30,c3,h9,w11,m20,k9x10", "b1,c6,h50,w50,m7,k9,s4x4"),
    *("b9,c40,h17,w15,m30,k1x7,p0x3", "b1,c3,h97,w41,m20,k5,s3x3,p2x2"),
    *("b5,c40,h24,w26,m33,k1,s2x2", "b9,c70,h7,w7,m40,k3,p1x1"),
    # Two threads and three pack chunks of weights that end within a channel.
    *("b5,c74,h9,w7,m128,k3,p2x2,d2x2,g2", "b7,c70,h11,w12,m64,k1x5,p0x2"),
]
# By kernels for float32 only: `direct`, `winograd`, `depthwise`.
BY_FLOATS = [
    *("b2,c1,h28,w28,m50,k5", "b2,c1,h70,w70,m12,k5", "b2,c12,h33,w33,m24,k7"),
    *("b1,c3,h40,w40,m9,k3", "b1,c30,h40,w40,m9,k3", "b1,c700,h7,w7,m99,k1"),
    # Two threads pack parts of transformed weights of 700 channels; one packs all of them first.
    *("b1,c700,h12,w9,m64,k3,p1x2,d1x2", "b1,c64,h12,w9,m700,k3,p1x2,d1x2"),
    # Whole planes for each thread, and parts of planes.
    *("b2,c40,h60,w61,m40,k5x5,p2x2,g40", "b1,c24,h999,w130,m24,k3,s2x2,g24"),
]
# Nine threads repack more images at a time.
MANY_IMAGES = "b14,c130,h35,w35,m200,k1,s2x2"


@every(dtype=ITEM_BYTES, text=THREADED)
def test_no_result_depends_on_threads(isa, text, dtype, rng):
    backends = (cpu, strict) if dtype == "float32" else (cpu,)
    _check_threads(text, dtype, backends, rng, (1, 2, 5))


@every(text=BY_FLOATS)
def test_no_result_of_other_kernels_depends_on_threads(isa, text, rng):
    _check_threads(text, "float32", (cpu,), rng, (1, 2, 3, 7, 16))


def test_no_result_of_many_images_depends_on_threads(isa, rng):
    _check_threads(MANY_IMAGES, "float32", (cpu,), rng, (2, 9))


@pytest.mark.slow
@every(dtype=ITEM_BYTES, text=[*THREADED, MANY_IMAGES])
def test_no_result_whatever_depends_on_threads(isa, text, dtype, rng):
    _check_threads(text, dtype, (cpu, strict), rng, (1, 2, 3, 5, 9))


def _check_threads(text, dtype, backends, rng, counts):
    problem = ConvProblem.parse(text if dtype == "float32" else f"{text},{dtype}")
    x, w, dy = _real(problem, rng)
    for direction in DIRECTIONS:
        for backend in backends:
            found = []
            for threads in counts:
                with settings.override(threads=threads):
                    found.append(run(backend, problem, direction, (x, w, None, dy)))
            for other in found[1:]:
                np.testing.assert_array_equal(other, found[0], err_msg=direction)


@every(
    case=[
        # By one kernel each, forward within closer bounds.
        ("b2,c9,h30,w33,m9,k5,p2x2,g9", 3e-7),
        ("b2,c8,h29,w33,m16,k3,s2x2,g8", 3e-7),
        ("b2,c12,h33,w33,m24,k7", 5e-7),
        ("b2,c6,h22,w22,m16,k5", 3e-7),
        *("b1,c256,h14,w14,m9,k3,p1x1", "b2,c1,h28,w28,m50,k5", "b2,c1,h70,w70,m12,k5"),
        *("b1,c3000,h6,w7,m9,k1", "b2,c64,h14,w14,m16,k3,p1x1", "b1,c512,h9,w9,m8,k3,p1x1"),
        *("b8,c3,h60,w60,m8,k7,s2x2,p3x3", "b1,c3,h26,w26,m512,k3,p1x1", "b1,c512,h20,w20,m4,k3"),
        *("b1,c2000,h17,w17,m20,k1", "b4,c3,h64,w64,m8,k64", "b2,c3,h64,w64,m16,k16,s16x16"),
        *("b1,c1,h1,w9000,m8,k1x3000,s1x2", "b9,c64,h30,w30,m40,k3,p2x2,d2x2"),
        "b2,c32,h60,w200,m32,k1,s2x2",
    ]
)
def test_error_against_float64(isa, case, rng):
    text, most = (case, 1e-6) if isinstance(case, str) else case
    problem = ConvProblem.parse(text)
    x, w, dy = _real(problem, rng)
    arrays = placed("end", x, w, None, dy)
    for direction, exact in oracle.every_direction(problem, x, w, None, dy).items():
        found = run(cpu, problem, direction, arrays)
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert error <= (most if direction == "forward" else 1e-6), (direction, error)
        # Rounded once, to half a unit in the last place.
        exactly = run(strict, problem, direction, arrays)
        assert (np.abs(exactly - exact) <= 2**-24 * 1.0001 * np.abs(exact)).all(), direction


def test_half_precision_in_portable_code():
    library = native.library()
    to_float, to_half = library.ece408_half_to_float, library.ece408_float_to_half
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float32)
    found = np.array([to_float(int(b)) for b in bits], np.float32)
    np.testing.assert_array_equal(found, values)
    # Every half, the midpoint to the next one, and the neighbours of the midpoint.
    finite = np.sort(values[np.isfinite(values)])
    middle = (finite[:-1].astype(np.float64) + finite[1:]) / 2
    tricky = np.concatenate(
        [finite, middle, np.nextafter(middle.astype(np.float32), np.float32(np.inf)),
         np.nextafter(middle.astype(np.float32), np.float32(-np.inf)),
         np.array([65519.9, 65520, 65521, 1e9, np.inf, -np.inf, np.nan, 1e-9, 2**-25, -0.0])]
    ).astype(np.float32)  # fmt: skip
    halves = np.array([to_half(float(v)) for v in tricky], np.uint16).view(np.float16)
    np.testing.assert_array_equal(halves, tricky.astype(np.float16))
    assert np.signbit(halves[-1])


@pytest.mark.slow
@pytest.mark.parametrize("side", ["input", "output"])
def test_more_elements_than_32_bits_count(side):
    """Even the last of more than 2^31 elements in x or in y is right."""
    wide, few = 2**31 // (1 << 16) + 3, 1
    channels, filters = (wide, few) if side == "input" else (few, wide)
    problem = ConvProblem(1, channels, 256, 256, filters, (1, 1), pad=(0, 0), dtype="float16")
    # The arrays in half precision, and their copies in single.
    need = 6 * (math.prod(problem.x_shape) + math.prod(problem.y_shape))
    if available_bytes() < need:
        pytest.skip(f"needs {need >> 30} GiB of memory")
    x = np.zeros(problem.x_shape, np.float16)
    x[:, -1, -1, -5:] = 3
    x[:, 0, 0, :5] = 3
    w = np.full(problem.w_shape, 2, np.float16)
    y = np.full(problem.y_shape, np.nan, np.float16)
    cpu.forward(problem, x.ctypes.data, w.ctypes.data, None, y.ctypes.data, False)
    for channel in (0, filters - 1):
        first = 6 if side == "input" or channels == 1 else 0
        assert (y[0, channel, 0, :5] == first).all()
        assert (y[0, channel, -1, -5:] == 6).all()
        assert not y[0, channel, 100].any()
