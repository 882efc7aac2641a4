"""A peer in a separate process, under another Python, that answers requests in lines of JSON.

It first writes its versions, then an answer to each line that it reads; `serve` is its end of the
pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ... import settings
from ...errors import InvalidSetting


class Peer:
    """A program of this folder that runs for the duration of a `with` block on the CPU, with our
    number of threads and its stderr hidden.

    Raises `InvalidSetting`, whose message ends with the `remedy`, when the process does not start
    or has ended.
    """

    program: ClassVar[str]
    remedy = "name a Python with PyTorch as --peer-python, or leave PyTorch out"
    stderr: ClassVar[int | None] = subprocess.DEVNULL

    def __init__(self, python: str) -> None:
        self._python = python
        try:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name(self.program))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                text=True,
                env=self.environment(),
            )
        except OSError as error:
            raise InvalidSetting(f"{python} does not run: {error}; {self.remedy}") from error
        try:
            self.versions = self._line()
        except InvalidSetting:
            self.__exit__()
            raise

    @staticmethod
    def environment() -> dict[str, str]:
        """Return the environment of the process."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.threads()))
        return {**os.environ, **threads}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        # The process may have ended before it read a request.
        with self._process, suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to one request. Raises `InvalidSetting` if the process has ended."""
        with suppress(BrokenPipeError):  # then no answer follows either
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._line()

    def ms(self, **request: Any) -> float:
        """Return the time in the answer, in ms. Raises what `ask` does."""
        return self.ask(**request)["ms"]

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InvalidSetting(f"{self._python} ended; {self.remedy}")
        return json.loads(line)


class GpuPeer(Peer):
    """A program that uses a GPU, without this Python's packages and libraries on its paths. Its
    stderr is shown."""

    remedy = (
        "its messages, if any, are above. Give a Python with PyTorch and CUDA by --peer-python, or "
        "leave PyTorch and cuDNN out"
    )
    stderr = None

    @staticmethod
    def environment() -> dict[str, str]:
        paths = ("PYTHONPATH", "LD_LIBRARY_PATH")
        return {name: value for name, value in os.environ.items() if name not in paths}
