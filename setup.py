"""Builds two shared libraries, the CPU kernels and the operator that MXNet loads.

`CXX`, `CXXFLAGS` and `LDFLAGS` are respected. The libraries have plain C interfaces, so that the
wheel fits every Python 3 on its platform. The second is compiled with the part of MXNet's wheel
that is meant for this; where the build has no MXNet the package is built without it, and graphs
then run with the operator written in Python. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

KERNELS = "ece408_op.backends.cpu.libece408_cpu"
OPERATOR = "ece408_op.operator.libece408_mxnet"
SOURCES = Path("kernels/cpu")
OPERATOR_SOURCES = Path("kernels/mxnet")
# What a .pth file runs, and the name of its copy outside of the package.
STARTUP_HOOK = Path("ece408_op/operator/startup_hook.py")
STARTED = "_ece408_op_startup_hook"
COMMON = ("-std=c++17", "-O3", "-g0", "-fPIC", "-pthread", "-Wall", "-Wextra")
INCLUDE = ("-I", str(SOURCES))
# Standard C++ is used for its language only: as needed, libstdc++ is not linked at all.
LANGUAGE_ONLY = ("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno")
# Threads of a library sleep in its code, so it stays loaded.
LINK = ("-shared", "-pthread", "-ldl", "-Wl,--as-needed", "-Wl,-z,nodelete")
# Sources by their path in SOURCES; those that are compiled once, with these options.
FIXED: dict[str, tuple[str, ...]] = {
    **{"conv/reference": ("-ffp-contract=off",), "api/choice": ("-ffp-contract=off",)},
    **{"api/dispatch": (), "host/copies": (), "host/halves": (), "host/thread_pool": ()},
    **{"network/program": (), "network/strided": (), "network/planes": ("-ffp-contract=off",)},
}
# Processors with AVX2 have prefetchw, or do nothing for it.
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mprfchw")
AVX512 = (
    *("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", *AVX2),
    "-mprefer-vector-width=512",
)
# Compiled once for each instruction set, with these options. The loop of 1x1 layers in `direct` is
# up to a seventh slower where its code begins at an unlucky address.
PER_ISA: dict[str, tuple[str, ...]] = {
    **{"conv/direct": ("-falign-loops=32",), "conv/winograd": (), "conv/depthwise": ()},
    **{"conv/conv_bwd_w_dot": (), "conv/general": ()},
    **{"layers/batch_norm": (), "layers/pool": (), "host/ceilings": ()},
    # Comparisons are vectorised if they need not set flags.
    **dict.fromkeys(("network/pointwise", "network/rows"), ("-fno-trapping-math",)),
}
# Instruction set: floats in a vector, and the compiler's options.
ISAS = {"baseline": (4, ()), "avx2": (8, AVX2), "avx512": (16, AVX512)}
DATA_FILES = ("*.cpp", "*.cc", "*.h", "*.cu", "*.cuh", "*.md", "*.json", "*.params")
NO_COMPILER = (
    "ece408_op needs a C++ compiler to build its CPU kernels, and {tried}: "
    "install g++ or clang++ (Debian, Ubuntu: `apt install g++`), or set CXX to one"
)


def find_compiler() -> list[str]:
    """The command of the C++ compiler: CXX, or the first usual one there is."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]) is None:
            raise SystemExit(NO_COMPILER.format(tried=f"CXX={asked[0]} is not there"))
        return asked
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name) is not None:
            return [name]
    raise SystemExit(NO_COMPILER.format(tried="there is no g++, clang++ or c++"))


def run_compiler(command: list[str], what: str) -> str:
    """What the command printed; the build ends if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(NO_COMPILER.format(tried=f"{command[0]} does not run ({error})")) from None
    if result.returncode != 0:
        raise SystemExit(
            f"{result.stderr}\nece408_op: the C++ compiler failed on {what} (its messages are "
            f"above); the command was: {shlex.join(command)}"
        )
    return result.stdout


Objects = dict[str, tuple[Path, tuple[str, ...]]]


def mxnet_folder() -> Path | None:
    """MXNet's package, unless there is none in this build or it lacks what operators need."""
    spec = importlib.util.find_spec("mxnet")
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    return next((f for f in folders if (f / "src" / "lib_api.cc").is_file()), None)


def operator_objects(mxnet: Path) -> Objects:
    """As `kernel_objects`; MXNet's part shows its functions to MXNet by default.

    One of these is ours instead (part_operator.cpp): MXNet never frees what that allocates.
    """
    folders = (mxnet / "include", mxnet / "include" / "mkldnn")
    include = tuple(word for folder in folders for word in ("-isystem", str(folder)))
    # Without errno square roots are taken of several numbers at once.
    options = ("-fno-math-errno", *INCLUDE, *include)
    own: Objects = {f.stem: (f, options) for f in sorted(OPERATOR_SOURCES.glob("*.cpp"))}
    replaced = "-D_opCallMutateInputs=lib_api_mutate_inputs"
    return {**own, "lib_api": (mxnet / "src" / "lib_api.cc", (*include, replaced, "-w"))}


def kernel_objects(compiler: list[str]) -> Objects:
    """Every object file: its name, its source and its own options."""
    target = run_compiler([*compiler, "-dumpmachine"], "-dumpmachine")
    isas = ISAS if target.startswith("x86_64") else {"baseline": ISAS["baseline"]}
    plan = {
        Path(name).name: (SOURCES / f"{name}.cpp", (*INCLUDE, *LANGUAGE_ONLY, *options))
        for name, options in FIXED.items()
    }
    for isa, (lanes, options) in isas.items():
        macros = (f"-DECE408_ISA={isa}", f"-DECE408_LANES={lanes}")
        own = (*INCLUDE, *macros, *LANGUAGE_ONLY, *options)
        for name, more in PER_ISA.items():
            plan[f"{Path(name).name}_{isa}"] = (SOURCES / f"{name}.cpp", (*own, *more))
    return plan


class BuildKernels(build_ext):
    """Compiles each object with options of its own and links them into their library."""

    def get_ext_filename(self, fullname: str) -> str:
        """Without the Python ABI in its name: it is not an extension module."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        inputs = [Path("setup.py"), *SOURCES.glob("*/*"), *OPERATOR_SOURCES.iterdir()]
        if not self.force and is_newer(library, inputs):
            return
        compiler, mxnet = find_compiler(), mxnet_folder()
        if ext.name == KERNELS:
            self.build_library(compiler, library, kernel_objects(compiler))
        elif mxnet is not None:
            self.build_library(compiler, library, operator_objects(mxnet))
        else:
            self.warn("no MXNet in this build: graphs will run the operator written in Python")

    def build_library(self, compiler: list[str], library: Path, objects: Objects) -> None:
        flags = shlex.split(os.environ.get("CXXFLAGS", ""))
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(parents=True, exist_ok=True)

        def compile_one(name: str) -> str:
            source, options = objects[name]
            out = str(folder / f"{name}.o")
            command = [*compiler, *COMMON, *options, *flags, "-c", str(source), "-o", out]
            run_compiler(command, f"{source} ({name})")
            return out

        # Wide vectors come last and take longest: begun first, none is compiled alone at the end.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            begun = {name: pool.submit(compile_one, name) for name in reversed(objects)}
        compiled = [begun[name].result() for name in objects]
        link_flags = [*LINK, *shlex.split(os.environ.get("LDFLAGS", ""))]
        run_compiler(
            [*compiler, *flags, *compiled, *link_flags, "-o", str(library)], f"linking {library}"
        )


def is_newer(file: Path, inputs: list[Path]) -> bool:
    return file.exists() and all(file.stat().st_mtime > i.stat().st_mtime for i in inputs)


class BuildModules(build_py):
    """Adds what Python runs when it starts, so that `import mxnet` may come first."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copy(STARTUP_HOOK, Path(self.build_lib) / f"{STARTED}.py")
            line = f"import {STARTED}; {STARTED}.wait_for_mxnet()\n"
            (Path(self.build_lib) / f"{STARTED}.pth").write_text(line)


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for every Python 3 on the platform it was built on."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def data_packages() -> list[str]:
    """The folders of kernels and models, each named as the package it is installed as."""
    folders = [Path("kernels"), Path("models")]
    folders += [f for top in folders for f in sorted(top.rglob("*")) if f.is_dir()]
    return [".".join(("ece408_op", *folder.parts)) for folder in folders]


setup(
    packages=[*find_packages(include=["ece408_op", "ece408_op.*"]), *data_packages()],
    package_dir={"ece408_op.kernels": "kernels", "ece408_op.models": "models"},
    package_data={
        "ece408_op": ["py.typed"],
        "ece408_op.report": ["templates/*.j2"],
        **{package: list(DATA_FILES) for package in data_packages()},
    },
    # The Makefile compiles them beside pip.
    ext_modules=[]
    if os.environ.get("ECE408_KERNELS") == "made"
    else [
        Extension(KERNELS, sources=[str(SOURCES / f"{name}.cpp") for name in (*FIXED, *PER_ISA)]),
        Extension(OPERATOR, sources=[str(f) for f in sorted(OPERATOR_SOURCES.glob("*.cpp"))]),
    ],
    cmdclass={
        "build_ext": BuildKernels,
        "build_py": BuildModules,
        "bdist_wheel": AnyPythonWheel,
    },
)
