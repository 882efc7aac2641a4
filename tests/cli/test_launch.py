"""`ece408 launch`: its options, and its output for job starters."""

import json
import subprocess

import pytest

from ece408_op.cli.main import execute
from ece408_op.jobs import job_plan
from ece408_op.jobs.job_plan import Host


def test_what_cannot_be_is_one_line(refused, tmp_path):
    hosts = tmp_path / "hosts"
    for arguments, code, message in [
        (["--workers", "2"], 16, "there is no command to run; give one at the end"),
        (["--workers", "0", "--", "x"], 3, "0 is not a number of workers; give 1 or more"),
        (["--servers", "-1", "--", "x"], 3, "-1 is not a number of servers"),
        (["--workers", "9999", "--", "x"], 3, "9999 workers and 1 servers are more than"),
        (["--port", "80", "--", "x"], 16, "--port 80 is not the first of 4 ports; give one from"),
        (["--port", "65534", "--", "x"], 16, "give one from 1024 to 65532"),
        (["--connect-timeout", "0", "--", "x"], 16, "--connect-timeout 0 is not a time; give sec"),
        (["--connect-timeout", "nan", "--", "x"], 16, "--connect-timeout nan is not a time"),
        (["--ssh", "", "--", "x"], 16, "--ssh takes a command, such as"),
        (["--hosts", str(hosts), "--", "x"], 16, f"the hosts of {hosts} cannot be read"),
    ]:
        refused(code, message, "launch", *arguments)


def test_hosts_of_a_file(written):
    hosts = written("hosts", "# ours\nme@10.0.0.7\n\nnode1 10.0.0.8  # the fast one\n")
    assert job_plan.read_hosts(hosts) == [
        Host("me@10.0.0.7", "10.0.0.7"),
        Host("node1", "10.0.0.8"),
    ]
    hosts.write_text("localhost\n")
    assert job_plan.read_hosts(hosts) == [Host("localhost", "127.0.0.1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host; write the name of one on each line"),
        ("a b c\n", "hosts:1: 'a b c' is not a host"),
        ("\n-oProxyCommand=x\n", "hosts:2: '-oProxyCommand=x' is not a host"),
        ("no-such-host.invalid\n", "no-such-host.invalid has no IP address here"),
        ("localhost\n10.0.0.1\n", "localhost has the address 127.0.0.1 here, where other hosts"),
    ],
)
def test_files_of_hosts_that_mean_nothing(written, text, message):
    path = written("hosts", text)
    with pytest.raises(job_plan.InvalidSetting, match=message):
        job_plan.read_hosts(path)


def _printed(capsys, *arguments):
    assert execute(["launch", "--workers", "2", "--servers", "2", *arguments]) == 0
    return capsys.readouterr().out


# A worker's description of itself.
SAYS = ["sh", "-c", 'echo "$DMLC_ROLE of $DMLC_NUM_WORKER at $DMLC_PS_ROOT_URI:$DMLC_PS_ROOT_PORT"']
WORKER_SAYS = "worker of 2 at 10.0.0.1:29408\n"


@pytest.fixture
def programs_of(tmp_path, written, monkeypatch):
    """Fake the programs of a job starter, and servers, which print their role."""
    serve = written("serve", '#!/bin/sh\necho "$DMLC_ROLE"\n', 0o755)
    monkeypatch.setattr("ece408_op.jobs.starters.SERVING", (str(serve),))

    def run(script: str, **texts: str) -> str:
        for name, text in texts.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-3]"}
        result = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.stderr == ""
        return result.stdout

    return run


def test_slurm_s_script_gives_each_task_its_role(capsys, programs_of):
    script = _printed(capsys, "--print", "slurm", "--", *SAYS)
    assert "#SBATCH --ntasks=5\n" in script
    printed = programs_of(
        script,
        scontrol='[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"',
        getent='[ "$*" = "ahostsv4 n1" ] && echo "10.0.0.1 STREAM n1"',
        srun='[ "$1 $2" = "--kill-on-bad-exit=1 --label" ] && shift 2\n'
        'for task in 0 1 2 3 4; do SLURM_PROCID=$task "$@"; done',
    )
    assert printed == "scheduler\nserver\nserver\n" + 2 * WORKER_SAYS


def test_mpi_s_command_gives_each_process_its_role(capsys, programs_of, written):
    hosts = written("hosts", "10.0.0.1\n10.0.0.2\n")
    line = _printed(capsys, "--print", "mpi", "--hosts", str(hosts), "--", *SAYS)
    printed = programs_of(
        line,
        mpirun="""
        run() { for each in $(seq "$2"); do "${@:5}"; done; echo "$3 $4"; }
        part=()
        for word in "$@" :; do
          if [ "$word" = : ]; then run "${part[@]}"; part=(); else part+=("$word"); fi
        done""",
    )
    both = "-host 10.0.0.1:1,10.0.0.2:1\n"
    assert printed == (
        f"scheduler\n-host 10.0.0.1:1\nserver\nserver\n{both}{2 * WORKER_SAYS}{both}"
    )


def test_kubernetes_gets_a_job_for_each_role(capsys):
    items = json.loads(_printed(capsys, "--print", "kubernetes", "--port", "5000", "--", "x", "y"))
    service, *jobs = items["items"]
    assert service["kind"] == "Service"
    assert service["spec"]["ports"] == [{"port": 5000}]
    found = {}
    for job in jobs:
        template = job["spec"]["template"]
        (container,) = template["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment["DMLC_PS_ROOT_URI"] == service["metadata"]["name"]
        role = environment["DMLC_ROLE"]
        assert template["metadata"]["labels"]["role"] == role
        found[role] = (job["spec"]["parallelism"], container["command"])
    serving = list(job_plan.SERVING)
    assert found == {"scheduler": (1, serving), "server": (2, serving), "worker": (2, ["x", "y"])}
