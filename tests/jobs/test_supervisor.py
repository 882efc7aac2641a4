"""Jobs of programs without MXNet: how they are run, watched and ended."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import programs
import pytest

from ece408_op.errors import (
    HostLost,
    InvalidSetting,
    SchedulerFailed,
    SchedulerUnreached,
    ServerFailed,
    WorkerFailed,
)
from ece408_op.jobs import agent, job_plan, supervisor
from ece408_op.jobs.job_plan import SCHEDULER, SERVER, THIS, WORKER, Host, Member

# Runs longer than any test, like a child process of it.
LONG_S = 60
LONG = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Servers that do not end by themselves are ended a second after the workers."""
    monkeypatch.setattr(supervisor, "_LEAVE_S", 1.0)


@pytest.fixture
def mark(monkeypatch):
    """Return a word in the environment of all processes that a test starts."""
    word = f"ECE408_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(*word.split("="))
    return word


def _left(mark: str) -> dict[int, str]:
    """Return the other processes with the mark, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
    found.pop(os.getpid(), None)
    return found


def _wait_for(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def _job(worker, others=LONG, first=None, host=THIS, **environment):
    """Run a job of two workers and two servers: a program for each worker, or `first` for worker 0,
    and one for the others."""
    roles = [(SCHEDULER, 0), (SERVER, 0), (SERVER, 1), (WORKER, 0), (WORKER, 1)]
    members = []
    for role, number in roles:
        code = worker if role == WORKER else others
        code = first if first is not None and (role, number) == (WORKER, 0) else code
        root = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9"}
        own = {"ROLE": role, "NUMBER": str(number), **os.environ, **root, **environment}
        members.append(Member(role, number, host, (sys.executable, "-c", code), own, 2))
    return members


def _run(members, show_all=False, ssh="ssh", connect_s=60.0):
    supervisor.run(members, supervisor.ssh_command(ssh), show_all, connect_s)


def test_what_worker_0_prints_is_shown_as_it_is(capsys, mark):
    code = r"""if True:
        import os, sys
        print(os.environ["ROLE"], os.environ["NUMBER"])
        print("part 1\rpart 2", file=sys.stderr)
        sys.stdout.write("no end of line")
    """
    started = time.monotonic()
    _run(_job(code))
    assert 1 < time.monotonic() - started < LONG_S
    printed = capsys.readouterr()
    assert printed.out == "worker 0\nno end of line\n"
    assert printed.err == "part 1\rpart 2\n"
    assert _left(mark) == {}


def test_all_can_be_shown_with_their_names(capsys):
    code = "import os; print(os.environ['ROLE'])"
    _run(_job(code, code), show_all=True)
    assert sorted(capsys.readouterr().out.splitlines()) == [
        *("server 0: server", "server 1: server", "the scheduler: scheduler"),
        *("worker 0: worker", "worker 1: worker"),
    ]


def test_more_than_a_pipe_holds_is_read(capsys):
    _run(_job("print('x' * 1000000)", "pass"))
    assert capsys.readouterr().out == "x" * 1000000 + "\n"


def test_what_is_printed_at_the_very_end_is_shown(capsys, monkeypatch):
    """Also output between the last look at the pipes and the look at the processes."""
    monkeypatch.setattr(supervisor, "_show", _show_too_early)
    program = "import sys, time; time.sleep(0.5); print('a', flush=True); sys.exit(%d)"
    _run(_job(program % 0, "pass"))
    assert capsys.readouterr().out == "a\n"
    with pytest.raises(WorkerFailed, match=r"its last line: a$"):
        _run(_job(program % 9, "pass"))


def _show_too_early(selector, wait=supervisor._POLL_S, show=supervisor._show):
    """Look, and then let time pass in which a process may print and end."""
    found = show(selector, 0.0)
    time.sleep(1.0 if wait else 0.0)
    return found


@pytest.mark.parametrize(
    ("role", "number", "error", "code", "text"),
    [
        (WORKER, 1, WorkerFailed, "sys.exit(7)", "worker 1 ended with exit code 7"),
        (WORKER, 0, WorkerFailed, "os.kill(os.getpid(), 9)", "worker 0 was ended by SIGKILL"),
        (SERVER, 1, ServerFailed, "os.abort()", "server 1 was ended by SIGABRT"),
        (SCHEDULER, 0, SchedulerFailed, "sys.exit(3)", "the scheduler ended with exit code 3"),
    ],
)
def test_one_that_dies_ends_all(mark, role, number, error, code, text):
    program = f"""if True:
        import os, sys
        if (os.environ["ROLE"], os.environ["NUMBER"]) == {(role, str(number))}:
            print("the last line\\n", flush=True)
            {code}
        {LONG}
    """
    started = time.monotonic()
    with pytest.raises(error, match=rf"^{text}; its last line: the last line$"):
        _run(_job(program, program))
    assert time.monotonic() - started < LONG_S
    assert _left(mark) == {}


def test_a_scheduler_that_cannot_be_reached_ends_all(mark):
    # It gets a port, as every process of the job does, but never listens.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
        text = rf"cannot connect to the scheduler at 127.0.0.1:{port} within 1 seconds; is a firew"
        with pytest.raises(SchedulerUnreached, match=rf"^(worker|server) [01] {text}"):
            _run(_job(LONG, DMLC_PS_ROOT_PORT=port), connect_s=1.0)
    assert _left(mark) == {}


def test_a_scheduler_may_listen_late():
    unreached = threading.Event()
    with socket.socket() as scheduler:
        scheduler.bind(("127.0.0.1", 0))
        listens = threading.Event()
        late = threading.Timer(0.7, lambda: (listens.set(), scheduler.listen()))
        late.start()
        agent._reach("127.0.0.1", str(scheduler.getsockname()[1]), 60.0, unreached)
        # It does not give up earlier.
        assert listens.is_set()
        late.join()
    assert not unreached.is_set()


def test_a_program_s_own_exit_code_is_no_word_of_the_scheduler():
    code = f"import sys; sys.exit({agent.UNREACHED})"
    with pytest.raises(WorkerFailed, match=f"exit code {agent.UNREACHED}; it printed nothing"):
        _run(_job(LONG, LONG, first=code))


@pytest.mark.slow
def test_one_that_ignores_being_ended_is_killed(mark):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + LONG
    with pytest.raises(WorkerFailed, match="worker 0 ended with exit code 1; it printed nothing"):
        _run(_job(LONG, stubborn, first="import sys, time; time.sleep(1); sys.exit(1)"))
    assert _left(mark) == {}


def test_a_program_that_is_not_there_has_its_line(mark):
    members = _job(LONG)
    command = ("no-such-program",)
    members[-1] = Member(WORKER, 1, THIS, command, members[-1].environment, 2)
    with pytest.raises(WorkerFailed, match="code 127; its last line: no-such-program: No such"):
        _run(members)
    assert _left(mark) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_launcher_ends_the_job(mark, number):
    with subprocess.Popen(
        [sys.executable, "-m", "ece408_op", "launch", "--", sys.executable, "-c", LONG],
        env=programs.environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        _wait_for(lambda: list(_left(mark).values()).count("sleep\x0060\x00") == 2)
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=LONG_S)
    _wait_for(lambda: not _left(mark))
    if number == signal.SIGINT:
        assert launcher.returncode == 130
        assert errors.endswith("ece408: error: interrupted\n")
    else:
        assert launcher.returncode == -number


def test_a_process_dies_with_the_agent_beside_it(mark, monkeypatch):
    show = supervisor._show

    def killing(*arguments):
        found = show(*arguments)
        left = _left(mark)
        waiting = [number for number, line in left.items() if "long wait" in line]
        if len(waiting) == 5:
            # The parent of the last one is an agent.
            status = Path(f"/proc/{waiting[-1]}/status").read_text()
            os.kill(int(status.partition("PPid:")[2].split()[0]), signal.SIGKILL)
        return found

    monkeypatch.setattr(supervisor, "_show", killing)
    wait = "import time; time.sleep(60)  # long wait"
    with pytest.raises((WorkerFailed, ServerFailed, SchedulerFailed), match="ended by SIGKILL"):
        _run(_job(wait, wait))
    _wait_for(lambda: not _left(mark))


def test_workers_of_a_machine_share_its_cores(capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("ECE408_THREADS", raising=False)
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['ECE408_THREADS'])"
    _run(_job(code, code), show_all=True)
    each = max(1, len(os.sched_getaffinity(0)) // 2)
    found = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert found["server 1"] == "1 1"
    assert found["worker 0"] == found["worker 1"]
    assert int(found["worker 0"].split()[0]) <= each
    own = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('ECE408_THREADS'))"
    _run(_job(own, "pass", OMP_NUM_THREADS="7"))
    assert capsys.readouterr().out == "7 None\n"


@pytest.fixture
def stand_in(written):
    """A fake ssh, which runs the command on this machine, without this environment's variables; the
    host "silent" never answers."""
    path = written(
        "stand in",
        "#!/bin/sh\n"
        'if [ "$2" = silent ]; then echo "connect to host silent: timed out" >&2; exit 255; fi\n'
        'cd / && exec env -i HOST="$2" OPTION="$1" sh -c "$3"\n',
        0o755,
    )
    return f"'{path}' -4"


def test_processes_on_other_hosts(stand_in, capsys, mark, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    quotes = """a 'b' "c" $HOME \\ \n end"""
    code = """if True:
        import os
        print(os.environ["HOST"], os.environ["OPTION"], os.getcwd(), repr(os.environ["QUOTES"]))
    """
    _run(_job(code, host=Host("me@far", "127.0.0.1"), QUOTES=quotes), ssh=stand_in)
    assert capsys.readouterr().out == f"me@far -4 {tmp_path} {quotes!r}\n"
    assert _left(mark) == {}


def test_a_process_on_another_host_has_its_name(stand_in, mark):
    with pytest.raises(WorkerFailed, match=r"^worker 0 on far was ended by SIGKILL; it printed"):
        _run(
            _job(LONG, host=Host("far", "127.0.0.1"), first="import os; os.kill(os.getpid(), 9)"),
            ssh=stand_in,
        )
    assert _left(mark) == {}


def test_a_host_that_does_not_answer_ends_all(stand_in, mark):
    members = _job(LONG)
    members[-1] = Member(WORKER, 1, Host("silent", "127.0.0.1"), (), members[-1].environment, 1)
    text = (
        "^worker 1 on silent cannot be started, or is no longer heard of: ssh ended with exit code "
        "255; its last line: connect to host silent: timed out$"
    )
    with pytest.raises(HostLost, match=text):
        _run(members, ssh=stand_in)
    assert _left(mark) == {}


def test_on_a_host_that_hears_nothing_more_a_process_ends_itself(mark, monkeypatch, stand_in):
    monkeypatch.setattr(supervisor, "_SILENCE_S", 1.0)
    monkeypatch.setattr(supervisor, "_BEAT_S", 1000.0)
    with pytest.raises(WorkerFailed, match="the job has said nothing for 1 seconds"):
        _run(_job("import time; time.sleep(60)", "pass", host=Host("far", "")), ssh=stand_in)
    assert _left(mark) == {}


def test_ssh_asks_nothing_and_can_be_told_more():
    words = supervisor.ssh_command("ssh -p 2222")
    assert words[:3] == ["ssh", "-p", "2222"]
    assert "BatchMode=yes" in words
    assert supervisor.ssh_command("enter 'my host'") == ["enter", "my host"]
    with pytest.raises(InvalidSetting, match="is not a command"):
        supervisor.ssh_command("ssh '")
    with pytest.raises(InvalidSetting, match="no-such-ssh does not run: No such file"):
        _run(_job("pass", host=Host("far", "")), ssh="no-such-ssh")


def test_roles_and_ranks_of_a_job(monkeypatch):
    hosts = [Host("a", "10.0.0.2"), Host("b", "10.0.0.10"), Host("c", "9.0.0.1")]
    members = job_plan.job(["train"], 4, 2, hosts, 30000)
    assert [str(each) for each in members] == [
        *("the scheduler on a", "server 0 on c", "server 1 on a"),
        # MXNet sorts addresses as text, the last one first.
        *("worker 0 on c", "worker 1 on c", "worker 2 on a", "worker 3 on b"),
    ]
    assert [each.environment["PORT"] for each in members] == [str(30000 + n) for n in range(7)]
    for each in members:
        assert each.environment["DMLC_PS_ROOT_URI"] == "10.0.0.2"
        assert each.environment["DMLC_NODE_HOST"] == each.host.address
        assert each.command == (("train",) if each.role == WORKER else job_plan.SERVING)
        assert "HOME" not in each.environment
    here = job_plan.job(["train"], 2, 1, (), None)
    ports = [int(each.environment["PORT"]) for each in here]
    assert ports == sorted(set(ports))
    assert here[0].environment["DMLC_PS_ROOT_URI"] == "127.0.0.1"
    assert here[0].environment["HOME"] == os.environ["HOME"]
