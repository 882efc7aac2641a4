"""The other end of `cudnn_peer`: asks a Python that has PyTorch for cuDNN's times."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting
from ...problem import ConvProblem


class Peer:
    """A process that answers with times; `versions` are PyTorch's and cuDNN's."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions: dict[str, Any] = self._line()

    def measure(self, problem: ConvProblem, samples: int) -> dict[str, Any]:
        """Timings by variant of a float32 problem. Raises `InvalidSetting` if the process died."""
        names = ("batch", "channels", "height", "width", "filters", "kernel")
        request = {name: getattr(problem, name) for name in names}
        assert self._process.stdin is not None
        try:
            print(json.dumps({**request, "samples": samples}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise _ended() from None
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise _ended()
        return json.loads(line)


def _ended() -> InvalidSetting:
    return InvalidSetting(
        "the Python for cuDNN's times ended; its messages are above. Give one with PyTorch and "
        "CUDA by --peer-python, or leave cuDNN out with --no-peer"
    )


@contextlib.contextmanager
def peer(python: str) -> Iterator[Peer]:
    """A `Peer` under this Python, without this one's packages and libraries on its paths.

    Raises `InvalidSetting` when it does not run or has no PyTorch.
    """
    program = Path(__file__).with_name("cudnn_peer.py")
    try:
        process = subprocess.Popen(
            ["env", "-u", "PYTHONPATH", "-u", "LD_LIBRARY_PATH", python, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise InvalidSetting(f"{python} does not run: {error}") from error
    with process:
        try:
            yield Peer(process)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
