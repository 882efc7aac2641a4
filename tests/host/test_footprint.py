import pytest

from ece408_op.course import course_terms
from ece408_op.errors import NotEnoughMemory
from ece408_op.host import footprint

GIB = 1 << 30


def _fake_root(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


MEMINFO = {"proc/meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:  8388608 kB\n"}


def test_what_the_machine_has(tmp_path):
    assert footprint.available_bytes(_fake_root(tmp_path, MEMINFO)) == 8 * GIB
    assert footprint.available_bytes() > 0


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": f"{4 * GIB}\n",
            "memory.current": f"{3 * GIB}\n",
            "memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
        {
            "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "memory/memory.stat": f"total_inactive_file {GIB}\n",
        },
        {"memory.max": "max\n", "memory.current": "1\n"},
    ],
)
def test_a_containers_limit_counts_without_reclaimable_cache(tmp_path, files):
    left = 8 * GIB if files.get("memory.max") == "max\n" else 2 * GIB
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert footprint.available_bytes(_fake_root(tmp_path, {**MEMINFO, **files})) == left


def test_too_little_memory_names_a_batch_size_that_fits(mx, monkeypatch):
    symbol = course_terms.network(course_terms.TERMS["2019fa"])
    monkeypatch.setattr(footprint, "available_bytes", lambda: GIB)
    with pytest.raises(NotEnoughMemory, match=r"1.0 GiB are free; use --batch-size ") as caught:
        footprint.check_memory(symbol, 10000, 10000, 70)
    batch_size = int(str(caught.value).partition("--batch-size ")[2].split()[0])
    assert footprint.required_bytes(symbol, 10000, batch_size, 70) <= GIB
    footprint.check_memory(symbol, 10000, batch_size, 70)
    monkeypatch.setattr(footprint, "available_bytes", lambda: 1000)
    with pytest.raises(NotEnoughMemory, match="no batch size fits"):
        footprint.check_memory(symbol, 10000, 10000, 70)


@pytest.mark.parametrize("milestone", [pytest.param("m1.1", marks=pytest.mark.slow), "m2.1"])
def test_the_estimate_is_above_what_is_used_and_not_far(mx, run_ece408, fashion_mnist, milestone):
    result = run_ece408(milestone, "1000")
    used = int(result.stderr.partition("avgdata ")[2].partition("maxresident")[0]) << 10
    model = "baseline" if milestone == "m1.1" else "ece408"
    symbol = course_terms.load_model(course_terms.TERMS["2019fa"], model).symbol
    estimate = footprint.required_bytes(symbol, 1000, 1000, 70)
    assert used <= estimate <= 1.6 * used
