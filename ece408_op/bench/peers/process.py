"""A program in a process of its own, under another Python, that answers lines of JSON.

It writes which versions there are, then a line for each line it reads; `serve` is its end of this.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting


class Peer:
    """A program of this folder that runs for the length of a `with` block.

    `remedy` ends the message of the `InvalidSetting` that is raised when the process does not start
    or has ended. With `quiet` its own messages on stderr are not shown.
    """

    def __init__(
        self,
        program: str,
        python: str,
        environment: Mapping[str, str],
        remedy: str,
        quiet: bool = False,
    ) -> None:
        self._python, self._remedy = python, remedy
        try:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name(program))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise InvalidSetting(f"{python} does not run: {error}; {remedy}") from error
        try:
            self.versions = self._line()
        except InvalidSetting:
            self.__exit__()
            raise

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        # The process may have ended with a request unread.
        with self._process, suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request. Raises `InvalidSetting` if the process has ended."""
        with suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InvalidSetting(f"{self._python} ended; {self._remedy}")
        return json.loads(line)
