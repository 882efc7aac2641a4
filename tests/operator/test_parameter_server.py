"""Errors in MXNet's parameter server: the job ends."""

import sys

import programs
import pytest


def _job(run_ece408, workers, code):
    return run_ece408("launch", "--workers", str(workers), "--", sys.executable, "-c", code)


@pytest.mark.slow
def test_a_worker_that_fails_ends_though_others_wait_for_it(run_ece408):
    """MXNet would make it wait for all when Python ends, while the other worker waits for its
    push."""
    result = _job(
        *(run_ece408, 2),
        """if True:
        import ece408_op, mxnet as mx
        kv = mx.kv.create("dist_sync")
        kv.init("a", mx.nd.zeros(3))
        if kv.rank == 1:
            raise ValueError("no more")
        kv.push("a", mx.nd.ones(3))
        mx.nd.waitall()
        """,
    )
    assert result.returncode == 40
    last = "ece408: error: worker 1 ended with exit code 1; its last line: ValueError: no more\n"
    assert result.stderr.endswith(last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        # Known to the workers only.
        ("Mine()", "server 0 ended with exit code 1; its last line: AttributeError: Can't get"),
        ("mx.optimizer.SGD(lr_scheduler=print)", "Invalid Parameter format for lrs"),
    ],
)
def test_an_optimizer_that_fails_in_a_server_ends_the_job(run_ece408, optimizer, why):
    """MXNet would continue with wrong weights."""
    result = _job(
        *(run_ece408, 1),
        f"""if True:
        import ece408_op, mxnet as mx
        class Mine(mx.optimizer.SGD):
            pass
        kv = mx.kv.create("dist_sync")
        kv.set_optimizer({optimizer})
        kv.init("a", mx.nd.zeros(3))
        kv.push("a", mx.nd.ones(3))
        kv.pull("a", mx.nd.zeros(3))
        mx.nd.waitall()
        """,
    )
    assert result.returncode == 41
    assert why in result.stderr


def test_without_a_role_it_says_so():
    command = (sys.executable, "-m", "ece408_op.operator.parameter_server")
    result = programs.run(*command, DMLC_ROLE="worker")
    assert result.returncode == 1
    assert result.stderr == "DMLC_ROLE is 'worker', not server or scheduler\n"
