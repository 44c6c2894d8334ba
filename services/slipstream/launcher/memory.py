"""What the machine and its cgroup have left of memory, and whom the kernel killed for want of it."""

from __future__ import annotations

import re
from pathlib import Path

MIB = 2**20
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Memory that can be had now: of the machine, or what the cgroup's limit leaves of it."""
    lines = (proc / "meminfo").read_text().splitlines()
    figures = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    available = figures.get("MemAvailable", figures.get("MemFree", 0))
    left = cgroup_left_bytes(proc, cgroup)
    return available if left is None else min(available, left)


def total_bytes(proc: Path = PROC) -> int:
    """Memory of the machine, whoever has it now."""
    return next(
        int(line.split()[1]) * 1024
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )


def cgroup_left_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """What the tightest memory limit around this process leaves; None without one. File cache counts as free."""
    left: list[int] = []
    for directory, limit, used in _cgroups(proc, cgroup):
        try:
            bound = (directory / limit).read_text().strip()
            taken = int((directory / used).read_text())
            stat = (directory / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if bound.isdecimal() and int(bound) < 2**60:  # v1 writes a huge number for none
            cache = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            left.append(max(int(bound) - taken + (int(cache[1]) if cache else 0), 0))
    return min(left, default=None)


def _cgroups(proc: Path, cgroup: Path) -> list[tuple[Path, str, str]]:
    """Directories of this process's memory cgroups, innermost first, with the names of limit and use."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = Path(path.lstrip("/"))
        found += [(root / part, *names) for part in (inner, *inner.parents)]
    return found


def oom_kills(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Processes that the kernel has killed for want of memory, of the machine and of our cgroups, so far."""
    count = 0
    for file in (proc / "vmstat", *(directory / "memory.events" for directory, *_ in _cgroups(proc, cgroup))):
        try:
            match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        count += int(match[1]) if match else 0
    return count
