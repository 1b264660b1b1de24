"""Cores are counted as the process may use them: physical ones, within its affinity and its container's share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from starscope import machine

QUOTA, PERIOD = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"


def pretend(monkeypatch: pytest.MonkeyPatch, threads: int, per_core: int, files: dict[str, str]) -> None:
    """A machine of so many hardware threads, `per_core` neighbours to a core, with these files about its share."""
    pages = dict(files)
    for thread in range(threads):
        first = thread // per_core * per_core
        shared = ",".join(str(first + i) for i in range(per_core))
        pages[f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"] = shared
    monkeypatch.setattr(machine, "affinity", lambda: set(range(threads)))
    monkeypatch.setattr(machine, "read_lines", lambda path: pages.get(path, "").splitlines())


@pytest.mark.parametrize(
    ("threads", "per_core", "files", "cores"),
    [
        (8, 1, {}, 8),
        (8, 2, {}, 4),
        (1, 1, {}, 1),
        (8, 1, {"/sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        (8, 1, {"/sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (8, 2, {"/sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (8, 2, {"/sys/fs/cgroup/cpu.max": "700000 100000"}, 4),
        (8, 1, {"/sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        (8, 1, {"/sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        (8, 1, {QUOTA: "200000", PERIOD: "100000"}, 2),
        (8, 1, {QUOTA: "-1", PERIOD: "100000"}, 8),
        (8, 1, {"/sys/fs/cgroup/cpu.max": "garbage"}, 8),
    ],
)
def test_cores_are_those_of_the_affinity_and_the_container(
    monkeypatch: pytest.MonkeyPatch, threads: int, per_core: int, files: dict[str, str], cores: int
) -> None:
    pretend(monkeypatch, threads, per_core, files)
    assert machine.usable_cores() == cores


def test_a_machine_that_says_nothing_about_siblings_has_a_core_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: {0, 3, 5})
    monkeypatch.setattr(machine, "read_lines", lambda path: [])
    assert machine.usable_cores() == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_bound_to_one_thread_uses_one_core() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import starscope; from starscope.machine import usable_cores\n"
        "print(usable_cores(), starscope.load('demo', engine='native').engine.threads)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "1"]


def test_a_signal_that_comes_while_signals_are_deferred_is_handled_at_the_end() -> None:
    done, at_the_end = [], "nothing was raised"
    try:
        with machine.deferred_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")
    except KeyboardInterrupt:
        at_the_end = "once"
    assert (done, at_the_end) == (["the rest"], "once")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


V1, V2 = "/sys/fs/cgroup/memory/memory.", "/sys/fs/cgroup/memory."


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, 900_000),  # no container: what the system has
        ({f"{V2}max": "max"}, 900_000),
        ({f"{V2}max": "500000"}, 500_000),
        ({f"{V2}max": "500000", f"{V2}current": "200000"}, 300_000),
        ({f"{V2}max": "500000", f"{V2}current": "450000", f"{V2}stat": "anon 1\ninactive_file 50000"}, 100_000),
        ({f"{V2}max": "500000", f"{V2}current": "600000"}, 0),
        ({f"{V1}limit_in_bytes": "500000", f"{V1}usage_in_bytes": "200000",
          f"{V1}stat": "inactive_file 9\ntotal_inactive_file 20000"}, 320_000),
    ],
)  # fmt: skip
def test_free_memory_is_what_is_left_of_the_containers(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], left: int
) -> None:
    pages = {"/proc/meminfo": "MemTotal: 976 kB\nMemAvailable: 879 kB\n", **files}
    monkeypatch.setattr(machine, "read_lines", lambda path: pages.get(path, "").splitlines())
    assert machine.free_memory() == pytest.approx(left, abs=200)
