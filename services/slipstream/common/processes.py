"""Other processes. Linux alone has them in `/proc`; elsewhere a process is taken to have no children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def with_children(pid: int) -> Iterator[int]:
    """A process and all that come of it, each before its own."""
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it ended
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from with_children(int(child))
