"""Counters of warps, for kernels with known counts."""

import pytest

from ece408_op import settings
from ece408_op.backends.emulator import counts, emulator_compiler
from ece408_op.backends.emulator.library import Emulation, begin
from ece408_op.backends.emulator.library import load as load_library

PROGRAM = """
#include <cuda_runtime.h>
__device__ __noinline__ float twice(const float* x, int i) {
    return 2 * x[i];  // in a function
}
__global__ void kernel(float* y, const float* x, int n) {
    const int t = threadIdx.x;
    %(body)s
}
extern "C" int run() {
    float *x, *y;
    cudaMalloc(&x, 1 << 16);
    cudaMalloc(&y, 1 << 16);
    cudaMemset(x, 0, 1 << 16);
    kernel<<<%(launch)s>>>(y, x, 5);
    const int error = cudaDeviceSynchronize();
    cudaFree(x);
    cudaFree(y);
    return error;
}
"""


@pytest.fixture(scope="session")
def count(tmp_path_factory, kept):
    """Return counts of a kernel's body, by the line's number in it, from 1, and its source."""
    folder = tmp_path_factory.mktemp("counts")

    def counted(body, launch="1, 32"):
        text = PROGRAM % {"body": body, "launch": launch}
        first = text[: text.index(body)].count("\n") + 1
        path = folder / "program.cu"
        path.write_text(text)
        with settings.override(cache=kept):
            content = emulator_compiler.program(path, "counted")
            emulator_compiler.program.cache_clear()
            library = load_library(content)
        begin(library, Emulation("counted", threads=2))
        assert library.run() == 0
        found, launches = counts.located(counts.take(), content)
        assert [each.kernel for each in launches] == ["kernel"]
        return {
            (int(str(each.place).rpartition(":")[2]) - first + 1, each.what): each
            for each in found
            if str(each.place).startswith("program.cu:")
        }

    return counted


def _each(count, lines, cases):
    """Return the counts of lines with each case, which are compiled together. In them $ is the
    case, and y an array of its own."""
    body = "\n".join(
        f"{{ {lines}".replace("$", case).replace("y[", f"y[{256 * n} + ") + " }"
        for n, case in enumerate(cases)
    )
    found, step = count(body), lines.count("\n") + 1
    return [
        {(line - n * step, what): each for (line, what), each in found.items()}
        for n in range(len(cases))
    ]


def test_sectors_of_loads(count):
    cases = {"t": 4, "t + 1": 5, "2 * t": 8, "8 * t": 32, "0": 1, "31 - t": 4, "t / 8": 1}
    told = _each(count, "const float v = x[$];\ny[t] = v + 1;", cases)
    for found, sectors in zip(told, cases.values()):
        load, store = found[1, "global load"], found[2, "global store"]
        assert (load.warps, load.lanes, load.sectors) == (1, 32, sectors)
        assert (store.warps, store.lanes, store.sectors) == (1, 32, 4)


def test_sizes_of_accesses(count):
    """Wide accesses to shared memory are served in parts."""
    cases = {"float2": (8, 2), "float4": (16, 4), "char": (1, 1)}
    lines = "const $ v = ((const $*)x)[t];\n(($*)(&y[0]))[t] = v;\n__shared__ $ s[32];\ns[t] = v;\n"
    lines += "((char*)(&y[160]))[t] = (char&)s[31 - t];"
    for found, (sectors, passes) in zip(_each(count, lines, cases), cases.values()):
        assert found[1, "global load"].sectors == found[2, "global store"].sectors == sectors
        store = found[4, "shared store"]
        assert (store.passes, store.conflicts) == (passes, 0)


def test_bank_conflicts(count):
    cases = {"t": 1, "2 * t": 2, "32 * t": 32, "33 * t": 1, "7": 1, "t % 2 * 32": 2}
    lines = "__shared__ float s[1056];\ns[$] = t;\n__syncthreads();\ny[t] = s[$];"
    for found, passes in zip(_each(count, lines, cases), cases.values()):
        for what in ((2, "shared store"), (4, "shared load")):
            each = found[what]
            assert (each.warps, each.passes, each.conflicts) == (1, passes, passes - 1)
        assert (found[3, "barrier"].warps, found[3, "barrier"].lanes) == (1, 32)


def test_lanes_that_part_meet_again(count):
    body = """float sum = 0;
for (int i = 0; i < n; ++i) {
    if ((t + i) % 2)
        sum += x[t + 64 * i];
    else
        sum -= x[t];
    y[t + 32 * i] = sum;
}"""
    found = count(body)
    assert found[4, "global load"].warps == found[6, "global load"].warps == 5
    assert found[4, "global load"].lanes == found[6, "global load"].lanes == 5 * 16
    assert found[7, "global store"].warps == 5
    assert found[7, "global store"].lanes == 5 * 32


def test_a_loop_runs_as_long_as_one_lane_needs_it(count):
    load = count("float sum = 0;\nfor (int i = 0; i < t; ++i)\n    sum += x[i];\ny[t] = sum;")
    assert load[3, "global load"].warps == 31
    assert load[3, "global load"].lanes == sum(range(32))
    # All lanes read the same element.
    assert load[3, "global load"].sectors == 31
    assert load[4, "global store"].warps == 1


def test_lanes_that_return_are_gone(count):
    found = count("if (t >= n) return;\ny[t] = x[t];", launch="2, 48")
    load = found[2, "global load"]
    # Of two blocks, each with a warp of 32 and one of 16, all of which leave.
    assert (load.warps, load.lanes, load.possible_lanes) == (2, 10, 64)


def test_lanes_in_a_function_come_first(count):
    found = count("float v = 0;\nif (t % 4 == 0)\n    v = twice(x, t);\ny[t] = v;")
    store = found[4, "global store"]
    assert (store.warps, store.lanes) == (1, 32)
    (load,) = (each for (_, what), each in found.items() if what == "global load")
    assert (load.warps, load.lanes, load.sectors) == (1, 8, 4)


def test_lanes_stay_together_behind_a_shuffle(count):
    body = "const float v = __shfl_xor_sync(0xffffffff, x[t], 1);\ny[t] = v + x[t + 32];"
    found = count(body, launch="1, 64")
    for what in ("global load", "global store"):
        assert (found[2, what].warps, found[2, what].lanes) == (2, 64)


def test_atomics_are_counted(count):
    found = count("atomicAdd(y + t % 8, x[t]);")
    each = found[1, "atomic"]
    assert (each.warps, each.lanes, each.sectors) == (1, 32, 1)
