"""What the processes of a sandbox use, summed from the host's /proc: for machines where no cgroup is writable.

Everything in a sandbox descends from its process 1, to which the kernel also gives orphans.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNTED = ("RssAnon", "RssShmem", "Threads")


@dataclass
class TreeUsage:
    """Sums over living processes; processor time includes children they have waited for."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    task_count: int = 0


def countable() -> bool:
    """Whether this kernel lists children."""
    return Path("/proc/self/task", str(os.getpid()), "children").exists()


def tree_usage(root: int) -> TreeUsage:
    """Sum over process `root` and all below it. Those that end meanwhile are left out.

    Memory is what a process holds for itself or shares by mapping; pages that a fork left shared count twice.
    """
    total = TreeUsage()
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        try:
            total.cpu_s += _cpu_s(pid)
            memory_bytes, threads = _memory_and_threads(pid)
            below = children(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        total.memory_bytes += memory_bytes
        total.task_count += threads
        waiting += below
    return total


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S


def _memory_and_threads(pid: int) -> tuple[int, int]:
    values = dict.fromkeys(_COUNTED, 0)
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in values:
            values[name] = int(value.split()[0])
    return (values["RssAnon"] + values["RssShmem"]) * 1024, values["Threads"]


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that still are; also ended ones that nobody waited for."""
    return [
        int(child)
        for task in os.listdir(f"/proc/{pid}/task")
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]
