"""Recorder of MXNet's operators, on the CPU and the GPU, by MXNet's own profiler."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from ..operator import compiled_operator, variables
from ..operator.loading import when_imported
from .activities import OPERATOR, Activity


class MXNetRecorder:
    """Records every operator from MXNet's import, or from `start` if that is later, to `stop`, by
    the system's clock. After `stop`, `notes` says what is missing."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._mxnet: Any = None
        self._over = False
        self.notes: list[str] = []

    def start(self) -> None:
        variables.run_operators_one_by_one()
        when_imported(self._begin)

    def stop(self) -> list[Activity]:
        self._over = True
        if self._folder is None:
            return []
        profiler, file = self._mxnet.profiler, self._file()
        try:
            # Operators in progress belong to the profile; failures have already been reported.
            self._mxnet.nd.waitall()
        except self._mxnet.base.MXNetError:
            self.notes.append("an operator of MXNet's failed")
        profiler.set_state("stop")
        profiler.dump(True)
        try:
            # From its second file on, MXNet begins the list of events with a comma.
            text = re.sub(r"\[\s*,", "[", file.read_text(encoding="utf-8"), count=1)
            return parse(json.loads(text))
        except (OSError, ValueError):
            self.notes.append("MXNet's operators are not recorded: mx.profiler was used besides")
            return []
        finally:
            self._folder.cleanup()

    def abandon(self) -> None:
        """Stop recording and remove the file."""
        self._over = True
        if self._folder is not None:
            self._mxnet.profiler.set_state("stop")
            self._folder.cleanup()

    def _begin(self, mxnet: Any) -> None:
        if self._over:
            return
        self._mxnet = mxnet
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="ece408-profile-")
        except OSError as error:
            self.notes.append(f"MXNet's operators are not recorded: {error}")
            return
        mxnet.profiler.set_config(
            profile_symbolic=True,
            profile_imperative=True,
            continuous_dump=False,
            filename=str(self._file()),
        )
        mxnet.profiler.set_state("run")

    def _file(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "operators.json"


def parse(document: dict[str, Any]) -> list[Activity]:
    """Parse the operators in MXNet's profile, except our compiled one: pairs of events "B" and "E",
    nested within a thread, in microseconds of the system's clock."""
    devices: dict[int, str] = {}
    threads: dict[int, int] = {}
    begun: dict[tuple[int, int], list[dict[str, Any]]] = {}
    found = []
    for event in document["traceEvents"]:
        if event["ph"] == "M":
            devices[event["pid"]] = event["args"]["name"]
            continue
        device = devices.get(event["pid"], f"device {event['pid']}")
        thread = threads.setdefault(event["tid"], len(threads) + 1)
        open_ones = begun.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "B":
            open_ones.append(event)
        elif event["ph"] == "E" and open_ones:
            begin = open_ones.pop()
            if begin["name"] in (compiled_operator.NAME, f"_backward_{compiled_operator.NAME}"):
                # Our own operator; `op_recorder` records it by layer and kernel.
                continue
            found.append(
                Activity(
                    OPERATOR,
                    begin["name"],
                    1000 * begin["ts"],
                    1000 * (event["ts"] - begin["ts"]),
                    f"MXNet {device} thread {thread}",
                    {"context": device},
                )
            )
    return found
