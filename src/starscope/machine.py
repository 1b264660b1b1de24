"""What this machine lets the process use: cores and memory, as the system, the affinity and the container say; and the
signals by which it asks the process to end.

Two hardware threads of one core share its arithmetic: work that keeps it busy is not faster on both, so cores are
counted, not threads.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a process to end: Ctrl-C, `kill`, and a terminal that was closed."""
UNKNOWN_MEMORY = 1 << 62  # bytes, where nothing says how much there is


def usable_cores() -> int:
    """The cores to compute on: physical ones within the process's affinity, no more than the container's share."""
    threads = affinity()
    cores = {siblings(thread) for thread in threads}
    share = cgroup_cores()
    limit = len(cores) if share is None else max(1, min(len(cores), round(share)))
    return max(1, limit)


def affinity() -> set[int]:
    """The hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def siblings(thread: int) -> str:
    """The hardware threads of one core, as the system lists them: equal for those that share it."""
    path = f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
    return "".join(read_lines(path)) or str(thread)


def cgroup_cores() -> float | None:
    """The cores that a container may use at once (cgroup v2, then v1); None: no limit."""
    words = " ".join(read_lines("/sys/fs/cgroup/cpu.max")).split()
    if not words:
        words = [
            *read_lines("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
            *read_lines("/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
        ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def memory() -> dict[str, int | None]:
    """Bytes in all, free to use now, and allowed by the container and left of that (cgroup v2, then v1)."""
    table = {}
    for line in read_lines("/proc/meminfo"):
        name, _, value = line.partition(":")
        if value.split()[1:] == ["kB"]:
            table[name] = int(value.split()[0]) * 1024
    limits = read_lines("/sys/fs/cgroup/memory.max") or read_lines("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    limit = int(limits[0]) if limits and limits[0].isdigit() else None
    total = table.get("MemTotal")
    if limit is not None and total is not None and limit >= total:  # v1 writes "no limit" as a huge number
        limit = None
    left = None if limit is None else max(0, limit - cgroup_memory())
    return {"total": total, "available": table.get("MemAvailable"), "cgroup_limit": limit, "cgroup_left": left}


def cgroup_memory() -> int:
    """The bytes that count towards the container's limit, without file pages that it may drop."""
    used = read_lines("/sys/fs/cgroup/memory.current") or read_lines("/sys/fs/cgroup/memory/memory.usage_in_bytes")
    kinds = read_lines("/sys/fs/cgroup/memory.stat") or read_lines("/sys/fs/cgroup/memory/memory.stat")
    words = dict(line.split() for line in kinds if len(line.split()) == 2)
    droppable = words.get("total_inactive_file", words.get("inactive_file", "0"))
    if not (used and used[0].isdigit() and droppable.isdigit()):
        return 0
    return max(0, int(used[0]) - int(droppable))


def free_memory() -> int:
    """Bytes that may be used now, as far as the system and the container say."""
    found = memory()
    return min(size for size in (found["available"], found["cgroup_left"], UNKNOWN_MEMORY) if size is not None)


def bytes_text(count: int, digits: int = 1) -> str:
    """1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.{digits}f} TiB"


def cpu_model() -> str:
    """The processor's name."""
    for line in read_lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that come inside are handled at the end: for what an exception in its middle would break."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in that one alone
        yield
        return
    came: list[int] = []
    found = {number: signal.getsignal(number) for number in (*STOPPING, getattr(signal, "SIGALRM", signal.SIGINT))}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in reversed(handlers.items()):  # the alarm first, which raises again what is lost here
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


def read_lines(path: str) -> list[str]:
    """A small text file of the system; nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
