"""How many files this process may have open, connections among them: no caller may take those that it needs itself."""

from __future__ import annotations

import resource

MOST_FILES = 65536
MOST_CONNECTIONS = 4096


def raise_limit() -> None:
    """Have the soft limit of open files where the hard one allows it: shells and systemd set it low by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wished = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wished:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wished, hard))


def connection_limit(limit: int | None = None) -> int:
    """How many connections a server takes at once: half of the files that may be open, the limit as it is now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, limit // 2))
