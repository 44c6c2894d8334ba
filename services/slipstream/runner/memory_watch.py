"""How much memory a process and what it started hold. Linux alone has it in `/proc`; elsewhere it is taken for none."""

from __future__ import annotations

import resource
from pathlib import Path

from slipstream.common.processes import with_children

_PAGE_BYTES = resource.getpagesize()
_PROC = Path("/proc")
SLACK_BYTES = 2**30


def held_bytes(pid: int, limit_bytes: int) -> int:
    """Resident bytes of a process and all that come of it.

    Pages that several of them share count once, but that is looked at only where it may matter: above `limit_bytes`.
    """
    pids = list(with_children(pid))
    resident = sum(_resident(each) for each in pids)
    return resident if resident <= limit_bytes or len(pids) == 1 else sum(_share(each) for each in pids)


def bound_data(limit_bytes: int) -> None:
    """Refuse this process allocations far beyond its limit, which it would reach faster than anybody looks."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = 2 * limit_bytes + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _resident(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _share(pid: int) -> int:
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError):
        return _resident(pid)
    return 0
