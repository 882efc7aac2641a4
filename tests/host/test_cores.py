"""The default number of threads, from the available cores and the container's quota."""

import os

import pytest

from ece408_op import settings
from ece408_op.host import cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "125000 50000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "200000\n"}, 0.25),
        ({"cpu/cpu.cfs_quota_us": "50000\n"}, None),
    ],
)
def test_the_quota_of_both_kinds_of_control_group(tmp_path, files, quota):
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cores.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("quota", "threads"), [(None, 8), (16.0, 8), (8.0, 8), (2.5, 2), (1.0, 1), (0.5, 1)]
)
def test_threads_by_default(monkeypatch, quota, threads):
    monkeypatch.delenv("ECE408_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert settings.threads() == threads
    with settings.override(threads=5):
        assert settings.threads() == 5


@pytest.mark.parametrize(
    ("node", "list_of_node_1", "expected"),
    [
        ("1", "4-6,12,300", {4, 5, 6, 12}),
        ("1", "7", {7}),
        ("-1", "4-6", set(range(16))),
        ("1", "300-310", set(range(16))),
        ("1", None, set(range(16))),
        (None, "4-6", set(range(16))),
    ],
)
def test_the_cores_beside_a_gpu(tmp_path, monkeypatch, node, list_of_node_1, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for name, text in {
        "bus/pci/devices/0000:1b:00.0/numa_node": node,
        "devices/system/node/node1/cpulist": list_of_node_1,
    }.items():
        if text is not None:
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True)
            path.write_text(f"{text}\n")
    assert cores.beside("0000:1B:00.0", tmp_path) == expected
