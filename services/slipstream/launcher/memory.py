"""What a run needs of memory, and what the machine and its cgroup have left of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slipstream.launcher.config import RunConfig
from slipstream.models.qwen3_moe.config import MoeConfig

MIB = 2**20
BASE_MIB = {"orchestrator": 65, "broadcaster": 60, "router": 45, "sandbox": 40, "prefill": 230, "decode": 240,
            "runner": 95, "trainer": 330, "valkey": 8}  # fmt: skip
"""Proportional set size of each process of the demo, a little below what `slipstream status` shows."""
TRAINER_COPIES = 6
"""Weights, gradients, two moments, and the copies that are published and saved."""
WORKER_COPIES = 3
"""Weights served, weights fetched, and the bytes they came in."""

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(config: RunConfig, sizes: MoeConfig | None = None) -> int:
    """A lower bound of what all processes of a run take together."""
    sizes = sizes or config.model
    weights = 4 * sizes.parameter_count(sizes.vocab_size or 128)
    total = MIB * (BASE_MIB["valkey"] + BASE_MIB["orchestrator"] + BASE_MIB["broadcaster"])
    total += MIB * (BASE_MIB["router"] + BASE_MIB["sandbox"] + BASE_MIB["trainer"]) + TRAINER_COPIES * weights
    for pool in ("prefill", "decode"):
        engine: Any = getattr(config.section(pool), "engine", None)
        tokens = engine.block_count * engine.block_size_tokens
        kv = 4 * tokens * sizes.n_layers * 2 * sizes.n_kv_heads * sizes.head_dim
        total += config.replicas(pool) * (MIB * BASE_MIB[pool] + WORKER_COPIES * weights + kv)
    return total + config.replicas("runner") * MIB * BASE_MIB["runner"]


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Memory that can be had now: of the machine, or what the cgroup's limit leaves of it."""
    lines = (proc / "meminfo").read_text().splitlines()
    figures = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    available = figures.get("MemAvailable", figures.get("MemFree", 0))
    left = cgroup_left_bytes(proc, cgroup)
    return available if left is None else min(available, left)


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
