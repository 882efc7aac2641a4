"""Bad input: one clear line on stderr, a specific exit code, no files left."""

import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import programs
import pytest

from ece408_op import __version__, errors
from ece408_op.cli import profiling
from ece408_op.cli.main import execute
from ece408_op.files import resources

COMMANDS = (
    *("m1.1", "m1.2", "m2.1", "m3.1", "m4.1", "final", "compare", "doctor", "data", "cache"),
    *("swap", "models", "train", "report", "profile", "tune"),
)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["m2.1", "0"], 3, "'0' is not a size; give a whole number from 1 to 10000"),
        (["m2.1", "-1"], 3, "'-1' is not a size"),
        (["m1.1", "10001"], 3, "'10001' is not a size"),
        (["m2.1", "ece408", "abc"], 3, "'abc' is not a size"),
        (["m2.1", "5", "--batch-size", "x"], 3, "'x' is not a batch size"),
        (["m2.1", "5", "--threads", "0"], 3, "'0' is not a number of threads"),
        (["m2.1", "2.5"], 3, "'2.5' is not a size"),
        (["m2.1", "ece408", "1", "2"], 3, "3 arguments; give at most a model and a size"),
        (["m2.1", "abc"], 4, "unknown model 'abc'; term 2019fa has: baseline, ece408"),
        (["m2.1", "5", "6"], 4, "'5' is not a model"),
        (["m2.1", "baseline"], 4, "which is what m1.1 is for"),
        (["m1.1", "ece408"], 4, "ece408 runs our operator"),
        (["m2.1", "--term", "1999fa"], 4, "unknown term '1999fa'; there are: 2017fa"),
        (["m2.1", "5", "--data", "/nowhere"], 5, "/nowhere"),
        (["m2.1", "5", "--model-dir", "/nowhere"], 8, "/nowhere/ece408-symbol.json is not there"),
        (["m2.1", "5", "--precision", "half"], 16, "unknown precision 'half'; choose one of"),
        (["m2.1", "5", "--backend", "quantum"], 16, "unknown backend 'quantum'; choose one of"),
    ],
)
def test_bad_arguments(fashion_mnist, refused, arguments, code, message):
    refused(code, message, *arguments)


@pytest.mark.parametrize(
    ("name", "value", "code", "message"),
    [
        ("ECE408_BACKEND", "quantum", 16, "'quantum'"),
        ("ECE408_ISA", "mmx", 16, "'mmx' (ECE408_ISA)"),
        ("ECE408_THREADS", "many", 3, "'many'"),
    ],
)
def test_settings_in_the_environment_are_checked_too(
    refused, fashion_mnist, monkeypatch, name, value, code, message
):
    monkeypatch.setenv(name, value)
    refused(code, message, "m2.1", "5")


def test_unwritable_cache(refused, fashion_mnist, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    cache = str(tmp_path / "file" / "cache")
    monkeypatch.setenv("ECE408_CACHE", cache)
    refused(10, cache, "m2.1", "5")


def test_corrupt_checkpoint(refused, fashion_mnist, tmp_path):
    source = resources.models_dir() / "2019fa"
    for path in source.iterdir():
        content = path.read_bytes()
        cut = len(content) // 2 if path.suffix == ".params" else len(content)
        (tmp_path / path.name).write_bytes(content[:cut])
    refused(9, ".params", "m2.1", "5", "--model-dir", str(tmp_path))


def test_truncated_data(refused, tmp_path):
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(b"\0\0\x08\x03\0\0\x27\x10")
    refused(6, str(tmp_path), "m2.1", "5", "--data", str(tmp_path))


def test_too_little_memory(fashion_mnist, monkeypatch, capsys):
    from ece408_op.host import footprint

    monkeypatch.setattr(footprint, "available_bytes", lambda: 1 << 30)
    assert execute(["m2.1"]) == errors.NotEnoughMemory.exit_code
    assert "use --batch-size " in capsys.readouterr().err


def _assert_one_line(result, code, message):
    assert re.fullmatch(f"ece408: error: .*{message}.*\n", result.stderr), result.stderr
    assert result.returncode == code


def test_without_mxnet(run_python, fashion_mnist):
    block = "import sys; sys.modules['mxnet'] = None; from ece408_op.cli.main import main; "
    result = run_python(block + "main(['m2.1', '5'])")
    newer = sys.version_info >= (3, 13)
    remedy = "it needs Python 3.9 to 3.12" if newer else r"pip install 'ece408_op\[cpu\]'"
    _assert_one_line(result, 11, f"MXNet is not installed .* {remedy}")
    assert run_python(block + "main(['--help'])").returncode == 0


def test_without_the_compiled_kernels(run_python, fashion_mnist):
    code = (
        "from pathlib import Path; from ece408_op.backends.cpu import native;"
        "native.LIBRARY = Path('/nowhere/lib.so');"
        "from ece408_op.cli.main import main; main(['m2.1', '5'])"
    )
    _assert_one_line(run_python(code), 13, "the compiled CPU kernels are not at /nowhere/lib.so")


def test_ctrl_c_ends_a_long_forward_pass(fashion_mnist):
    command = [sys.executable, "-m", "ece408_op", "m2.1", "5000", "--backend", "reference"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job, as in continuous integration, ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        for line in process.stdout:
            if line == "New Inference\n":
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert stderr == "ece408: error: interrupted\n"
    assert process.returncode == 130


def test_usage_errors_are_one_line(run_ece408):
    result = run_ece408("m2.1", "--colour")
    assert result.stderr.splitlines() == [
        "ece408: error: unrecognized arguments: --colour; --help lists the arguments"
    ]
    assert result.returncode == 2


def test_debug_shows_the_traceback(run_here):
    result = run_here("m2.1", "0", "--debug")
    assert result.stderr.startswith("Traceback")
    assert result.returncode == 3


def test_an_unexpected_error_is_one_line_too(monkeypatch, capsys):
    from ece408_op.course import milestone

    monkeypatch.setattr(milestone, "make_request", lambda *a, **k: 1 // 0)
    assert execute(["m2.1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ece408: error: unexpected ZeroDivisionError: ")
    assert "--debug" in error


def test_version_and_help(run_ece408, capsys):
    package, *others = run_ece408("--version").stdout.splitlines()
    assert package == f"ece408_op {__version__}"
    assert [each.split(":")[0] for each in others] == ["MXNet", "CUDA compiler", "NVIDIA driver"]
    assert run_ece408("--help").stdout.startswith("usage: ece408")
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            execute([name, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: ece408 {name}")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ece408 gp", ["gpu-setup"]),
        ("ece408 lab che", ["check"]),
        ("ece408 lab check --emu", ["--emulate"]),
        ("ece408 gpu-setup --cuda ", ["12", "13"]),
    ],
)
def test_words_are_completed(line, expected, tmp_path):
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked.update(_ARGCOMPLETE_STDOUT_FILENAME=str(tmp_path / "words"), _ARGCOMPLETE_IFS=" ")
    command = [sys.executable, "-m", "ece408_op"]
    subprocess.run(command, env=programs.environment(**asked), timeout=60)
    assert (tmp_path / "words").read_text().split() == expected


def test_scripts_are_the_subcommands(fashion_mnist):
    script = resources.models_dir().parent / "scripts" / "m2.1.py"
    result = programs.run(sys.executable, script, "ece408", "10")
    assert result.stdout.startswith("Loading fashion-mnist data... done\n")
    assert result.returncode == 0
    lost = programs.run(sys.executable, "-S", "-E", script)
    assert "m2.1: ece408_op is not installed for" in lost.stderr
    assert lost.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["m21"], "there is no command 'm21'; did you mean m2.1?"),
        (["docter"], "there is no command 'docter'; did you mean doctor?"),
        (["lab", "chek", "x.cu"], "there is no action 'chek'; did you mean check?"),
        (["m2.1", "--bach-size=5"], "there is no option '--bach-size'; did you mean --batch-size?"),
        (
            ["lab", "check", "--emulat1", "x"],
            "there is no option '--emulat1'; did you mean --emulate?",
        ),
        (["doctor", "--xyz"], "unrecognized arguments: --xyz; --help lists the arguments"),
    ],
)
def test_a_word_that_is_nearly_right_is_suggested(capsys, arguments, meant):
    with pytest.raises(SystemExit, match="2"):
        execute(arguments)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.endswith(f"error: {meant}")


def test_a_word_like_no_other_gets_the_list(capsys):
    with pytest.raises(SystemExit, match="2"):
        execute(["quantum"])
    assert "(choose from 'm1.1', 'm1.2'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["lab"]])
def test_without_a_command_there_is_help(capsys, arguments):
    assert execute(arguments) == 0
    assert capsys.readouterr().out.startswith(" ".join(["usage: ece408", *arguments]))


def test_what_ncu_is_to_run_again_is_the_command(mx, fashion_mnist, monkeypatch):
    found = []

    def profile(program, line, again, *_):
        found.append((line, again))
        return SimpleNamespace(failure=None)

    monkeypatch.setattr(profiling, "profile", profile)
    assert execute(["m2.1", "5", "--ncu"]) == 0
    ((line, again),) = found
    assert line == again[-2:] == ["m2.1", "5"]
    assert subprocess.run([*again, "--help"], check=False).returncode == 0
