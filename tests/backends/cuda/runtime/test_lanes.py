"""Lanes of a GPU with a fake driver: which memory is reused."""

from types import SimpleNamespace

import numpy as np
import pytest

from ece408_op.backends.cuda.runtime.device import Gpu


class _Block(int):
    def free(self):
        pass


class _Pages(np.ndarray):
    @property
    def base(self):
        return _Block()


class _Device:
    def __init__(self, index):
        pass

    def name(self):
        return "pretended"

    def compute_capability(self):
        return (9, 0)

    def total_memory(self):
        return 1 << 20

    def pci_bus_id(self):
        return "0000:00:00.0"

    def get_attribute(self, attribute):
        return 132

    def retain_primary_context(self):
        return None


@pytest.fixture
def gpu():
    made = []
    cuda = SimpleNamespace(
        Device=_Device,
        Event=lambda flags: None,
        Stream=lambda: None,
        event_flags=SimpleNamespace(BLOCKING_SYNC=1, DEFAULT=0),
        device_attribute=SimpleNamespace(MULTIPROCESSOR_COUNT=0),
        get_driver_version=lambda: 13000,
        mem_alloc=lambda nbytes: made.append(nbytes) or _Block(len(made)),
        pagelocked_empty=lambda nbytes, kind: np.empty(nbytes, kind).view(_Pages),
        made=made,
    )
    return Gpu(cuda, 0)


def test_lanes_are_ready_when_they_have_the_memory(gpu):
    with gpu.ready_lanes(2, 100, 50, 1000) as ready:
        assert ready == []
    with gpu.lanes(2, 100, 50, 1000) as first:
        addresses = {lane.device for lane in first}
    with gpu.ready_lanes(2, 90, 50, 1000) as ready:
        assert {lane.device for lane in ready} == addresses
        with gpu.ready_lanes(1, 90, 50, 1000) as others:
            assert others == []
    with gpu.ready_lanes(2, 90, 50, 1000) as ready:
        assert len(ready) == 2
    assert gpu.cuda.made == [100, 100]


@pytest.mark.parametrize(
    "request_",
    [(3, 100, 50, 1000), (2, 101, 50, 1000), (2, 100, 51, 1000), (2, 100, 50, 199)],
    ids=["more lanes", "more on the GPU", "more on the host", "less allowed"],
)
def test_lanes_are_not_ready(gpu, request_):
    with gpu.lanes(2, 100, 50, 1000):
        pass
    with gpu.ready_lanes(*request_) as ready:
        assert ready == []
    with gpu.ready_lanes(2, 100, 50, 200) as ready:
        assert len(ready) == 2
