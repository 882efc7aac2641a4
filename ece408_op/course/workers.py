"""Workers of data-parallel training: processes that communicate through MXNet's KVStore."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import InvalidSetting, InvalidSize
from ..operator.loading import load_mxnet

# The first two are for one process, with one or several GPUs, the others for several processes.
KVSTORES = ("local", "device", "dist_sync", "dist_async")
_ADDRESS = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
_COUNTS = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")


def default_kvstore() -> str:
    """Return `dist_sync` in a job's worker process, else `local`."""
    return "dist_sync" if os.environ.get("DMLC_ROLE") == "worker" else "local"


class Workers:
    """The workers of a run; this process is number `rank` of `size`.

    A context manager: its exit waits for all workers, but not if this one fails. `store` is the
    argument for MXNet's Module. With `dist_sync` every worker has the same optimizer and its state,
    and servers sum gradients; with `dist_async` servers have the optimizer, and apply each worker's
    gradient when it arrives.

    Raises `InvalidSetting` for an unknown KVStore, and for `dist_*` in a process outside a job. In
    a server or scheduler process the constructor serves, and then exits.
    """

    def __init__(self, kvstore: str) -> None:
        if kvstore not in KVSTORES:
            raise InvalidSetting(
                f"unknown KVStore {kvstore!r}; choose one of {', '.join(KVSTORES)}"
            )
        self.kind = kvstore
        self.rank, self.size = 0, 1
        self.store: Any = kvstore
        self._sums: dict[str, Any] = {}
        if self.is_distributed:
            _check_environment()
        # A server or the scheduler does its whole work within the import of MXNet.
        mx = load_mxnet()
        if self.is_distributed:
            self.store = mx.kv.create(kvstore)
            self.rank, self.size = self.store.rank, self.store.num_workers

    @property
    def is_distributed(self) -> bool:
        """Whether workers are processes."""
        return self.kind.startswith("dist")

    @property
    def is_synchronous(self) -> bool:
        """Whether all workers have the same weights after each step."""
        return self.kind != "dist_async"

    def local_batch(self, batch: int) -> int:
        """Return one worker's number of images in a batch. Raises `InvalidSize` if the batch cannot
        be split equally."""
        if batch % self.size:
            raise InvalidSize(
                f"{self.size} workers cannot share a batch of {batch} images equally; give "
                f"--batch-size {-(-batch // self.size) * self.size}, or another number of workers"
            )
        return batch // self.size

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return rank 0's float32 arrays; each worker passes arrays with the same names and
        shapes."""
        if not self.is_distributed:
            return dict(arrays)
        mx = load_mxnet()
        found = {}
        for name, values in arrays.items():
            value = mx.nd.array(values)
            self.store.init(f"first:{name}", value)
            self.store.pull(f"first:{name}", value)
            found[name] = value
        return {name: value.asnumpy() for name, value in found.items()}

    def sum(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the sum, in float32, of all workers' values under a name; with `dist_async`, where
        servers do not wait for all, return this worker's."""
        if not self.is_distributed or not self.is_synchronous:
            return values
        mx = load_mxnet()
        if name not in self._sums:
            self._sums[name] = mx.nd.zeros(values.shape)
            self.store.init(f"sum:{name}", self._sums[name])
        self.store.push(f"sum:{name}", mx.nd.array(values))
        self.store.pull(f"sum:{name}", self._sums[name])
        return self._sums[name].asnumpy()

    def wait(self) -> None:
        """Wait for all workers, and for their previous computations."""
        load_mxnet().nd.waitall()
        if self.is_distributed:
            self.store._barrier()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.is_distributed:
            return
        base = load_mxnet().base
        if kind is not None:
            # The other workers may never reach the end, where this one would wait for them.
            base.check_call(base._LIB.MXKVStoreSetBarrierBeforeExit(self.store.handle, 0))
            return
        # Free it now: Python may drop it only after MXNet has shut down.
        base.check_call(base._LIB.MXKVStoreFree(self.store.handle))
        self.store.handle = base.KVStoreHandle()


def _check_environment() -> None:
    """Raise `InvalidSetting` unless the job's environment variables are set."""
    missing = [name for name in ("DMLC_ROLE", *_ADDRESS, *_COUNTS) if not os.environ.get(name)]
    if missing:
        raise InvalidSetting(
            f"--kvstore dist_* is for the processes of a job, and {missing[0]} is not set; start "
            "them by ece408 launch, such as ece408 launch --workers 2 -- ece408 train 2019sp"
        )
    for name in (*_ADDRESS[1:], *_COUNTS):
        if not os.environ[name].isdecimal() or int(os.environ[name]) < 1:
            raise InvalidSetting(f"{name}={os.environ[name]!r} is not a whole number from 1 on")
