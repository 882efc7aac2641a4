"""Programs whose streams are closed, full, or abandoned by their reader."""

import os
import re
import subprocess
import sys

import pytest
from cases import first
from places import SCRIPTS

from ece408_op.cli.program import EXIT_ABANDONED
from ece408_op.errors import OutputUnwritable

PROGRAMS = sorted(SCRIPTS.glob("[!_]*.py"))
ECE408 = (sys.executable, "-m", "ece408_op")


def _run(redirection, *command):
    """Run a command with a shell's redirection; `| gone` is a reader that has left."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    closed = [number for number in (0, 1, 2) if f"{number}>&-" in redirection]
    if redirection == "| gone":
        reader, streams["stdout"] = os.pipe()
        os.close(reader)
    for name, number in (("stdout", "1"), ("stderr", "2")):
        if f"{number}>/dev/full" in redirection:
            streams[name] = os.open("/dev/full", os.O_WRONLY)
    try:
        return subprocess.run(
            command,
            **streams,
            text=True,
            timeout=300,
            preexec_fn=lambda: [os.close(number) for number in closed],
        )
    finally:
        for stream in streams.values():
            if stream >= 0:
                os.close(stream)


def _assert_told(result, name):
    assert result.stderr.startswith(f"{name}: error: cannot write to standard output: ")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.returncode == OutputUnwritable.exit_code


@pytest.mark.parametrize("arguments", first(1, ["m2.1 5", "--help", "cache"]))
def test_output_that_does_not_arrive(fashion_mnist, arguments):
    command = arguments.split()
    full = _run("1>/dev/full", *ECE408, *command)
    _assert_told(full, "ece408")
    assert "No space left on device" in full.stderr
    _assert_told(_run("1>&-", *ECE408, *command), "ece408")
    gone = _run("| gone", *ECE408, *command)
    assert (gone.stderr, gone.returncode) == ("", EXIT_ABANDONED)
    silent = _run("0>&- 1>&- 2>&-", *ECE408, *command)
    assert silent.returncode == OutputUnwritable.exit_code


@pytest.mark.parametrize("redirection", first(1, ["2>&-", "2>/dev/full"]))
def test_without_stderr_results_and_exit_codes_are_the_same(fashion_mnist, redirection):
    """Messages for stderr must not go to standard output instead."""
    result = _run(redirection, *ECE408, "m2.1", "5")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].startswith("Correctness: ")
    assert "elapsed" not in result.stdout
    wrong = _run(redirection, *ECE408, "m2.1", "0")
    assert (wrong.stdout, wrong.returncode) == ("", 3)


def test_every_script_ends_like_that():
    for script in PROGRAMS:
        ending = rf'program\.run\("{script.stem}", main\)\n$| launch\("\S+"\)\n$'
        assert re.search(ending, script.read_text()), script
    for name, own in (("check_cuda", "check_cuda"), ("train", "ece408")):
        (script,) = (path for path in PROGRAMS if path.stem == name)
        _assert_told(_run("1>/dev/full", sys.executable, str(script), "--help"), own)


def test_a_reader_that_leaves_while_the_operator_prints(fashion_mnist):
    """Op times are printed on a thread of MXNet's."""
    command = [*ECE408, "m2.1", "20", "--batch-size", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not process.stdout.readline().startswith(b"Op Time"):
            pass
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == EXIT_ABANDONED


def test_a_profiled_script_whose_output_does_not_arrive(written):
    script = written("script.py", "for i in range(100000): print(i)\n")
    command = (*ECE408, "profile", "--no-gpu", str(script))
    _assert_told(_run("1>/dev/full", *command), "ece408")
    gone = _run("| gone", *command)
    assert (gone.stderr, gone.returncode) == ("", EXIT_ABANDONED)


def test_files_opened_later_do_not_become_closed_streams(tmp_path):
    """Output must not be written into such files, even by child processes."""
    code = """
import os, subprocess, sys
from ece408_op.cli import program

def work():
    with open("file", "w") as file:
        print("to nobody")
        print("neither", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo out; echo err >&2"])
        file.write(str(file.fileno() > 2))

program.run("test", work)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, preexec_fn=lambda: os.closerange(0, 3)
    )
    assert result.returncode == OutputUnwritable.exit_code
    assert (tmp_path / "file").read_text() == "True"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_on_stderr_is_seen_at_once(run_python, unbuffered):
    code = (
        "import os, sys; from ece408_op.cli import program\n"
        "def end():\n"
        "    print('now', file=sys.stderr)\n"
        "    os._exit(0)\n"
        "program.run('test', end)\n"
    )
    assert run_python(code, PYTHONUNBUFFERED=unbuffered).stderr == "now\n"


@pytest.mark.parametrize(
    ("tool", "printed"), [({}, []), ({"CUDA_INJECTION64_PATH": "x"}, ["late"])]
)
def test_a_program_that_ends_at_once_leaves_out_what_python_does_at_its_end(
    run_python, tool, printed
):
    """Its own output is complete, and that of libraries. Under a tool that works at exit it ends
    normally."""
    code = (
        "import atexit, ctypes; from ece408_op.cli import program\n"
        "atexit.register(print, 'late')\n"
        "def work():\n"
        "    print('done', flush=True)\n"
        "    ctypes.CDLL(None).puts(b'by C')\n"
        "    program.end_at_once()\n"
        "program.run('test', work)\n"
    )
    result = run_python(code, **tool)
    assert sorted(result.stdout.split("\n")) == sorted(["", "by C", "done", *printed])
    assert result.returncode == 0
