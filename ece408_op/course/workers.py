"""The processes that train one model together, and what they tell each other: MXNet's KVStore."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import InvalidSetting, InvalidSize
from ..operator.loading import load_mxnet

# Those of one process, with a GPU or several, and those of several processes.
KVSTORES = ("local", "device", "dist_sync", "dist_async")
_ADDRESS = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
_COUNTS = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")


def default_kvstore() -> str:
    """`dist_sync` in a process that a job has started as a worker, else `local`."""
    return "dist_sync" if os.environ.get("DMLC_ROLE") == "worker" else "local"


class Workers:
    """The workers of a run, this process being number `rank` of `size`.

    A context: it ends when all have come to its end, but at once where one fails. `store` is what
    MXNet's Module takes. With `dist_sync` every worker has the same optimizer and its state, and
    servers add gradients up; with `dist_async` servers have the optimizer, and apply the gradient
    of each worker as it comes.

    Raises `InvalidSetting` for an unknown KVStore, and for `dist_*` in a process that is no part of
    a job. Where the process is a server or the scheduler of one, it serves, and then ends.
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
        # Importing MXNet is all that a server or the scheduler does.
        mx = load_mxnet()
        if self.is_distributed:
            self.store = mx.kv.create(kvstore)
            self.rank, self.size = self.store.rank, self.store.num_workers

    @property
    def is_distributed(self) -> bool:
        """Whether its workers are processes."""
        return self.kind.startswith("dist")

    @property
    def is_synchronous(self) -> bool:
        """Whether all workers have the same weights after each step."""
        return self.kind != "dist_async"

    def local_batch(self, batch: int) -> int:
        """The images of a worker in a batch of all. Raises `InvalidSize` if they are no whole
        number."""
        if batch % self.size:
            raise InvalidSize(
                f"{self.size} workers cannot share a batch of {batch} images equally; give "
                f"--batch-size {-(-batch // self.size) * self.size}, or another number of workers"
            )
        return batch // self.size

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The float32 arrays of rank 0; each worker gives some of the same names and shapes."""
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
        """The sum, in float32, of what all workers give under a name; with `dist_async`, where
        servers do not wait for all, what this worker gives."""
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
        """Wait until all have come here, and what they computed before is done."""
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
            # The others may never come to the end, where this one would wait for them.
            base.check_call(base._LIB.MXKVStoreSetBarrierBeforeExit(self.store.handle, 0))
            return
        # Not whenever Python drops it, which may be after MXNet has ended.
        base.check_call(base._LIB.MXKVStoreFree(self.store.handle))
        self.store.handle = base.KVStoreHandle()


def _check_environment() -> None:
    """Raise `InvalidSetting` unless a job has told this process what it is in it."""
    missing = [name for name in ("DMLC_ROLE", *_ADDRESS, *_COUNTS) if not os.environ.get(name)]
    if missing:
        raise InvalidSetting(
            f"--kvstore dist_* is for the processes of a job, and {missing[0]} is not set; start "
            "them by ece408 launch, such as ece408 launch --workers 2 -- ece408 train 2019sp"
        )
    for name in (*_ADDRESS[1:], *_COUNTS):
        if not os.environ[name].isdecimal() or int(os.environ[name]) < 1:
            raise InvalidSetting(f"{name}={os.environ[name]!r} is not a whole number from 1 on")
