"""Names one start of a runner, so that a later start is told from an earlier one, whatever the wall clock does.

And lets one process at a time be the runner of a name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import structlog

from slipstream.common.disk import make_directory, replace_file
from slipstream.common.exits import ServiceFailed
from slipstream.common.locks import FileLock

log = structlog.get_logger()

DIGITS = 20


def next_epoch(file: Path, clock_ns: Callable[[], int] = time.time_ns) -> str:
    """An epoch above the one in `file`, which then holds it. Epochs order as text.

    The clock alone will not do: a runner that restarts after the clock was set back would take itself for the elder,
    and be refused until its predecessor's lease ends. A file that says nothing that makes sense counts as none, and is
    replaced whole: a death halfway leaves the epoch of before.

    Raises:
        DiskFull: there is no room.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = int(file.read_text())
    except (OSError, ValueError):
        before = 0
    if not 0 <= before < 10**DIGITS - 1:
        before = 0
    epoch = max(clock_ns(), before + 1)
    replace_file(file, f"{epoch}\n".encode())
    return f"{epoch:0{DIGITS}d}"


@contextmanager
def alone(run_dir: Path, runner_id: str) -> Generator[None, None, None]:
    """Be the one process here that runs as `runner_id`: a second would cut, and append to, the spool that the first
    writes.

    Raises:
        ServiceFailed: another process is.
        DiskFull: there is no room.
    """
    make_directory(run_dir)
    try:
        lock = FileLock(run_dir / f"{runner_id}.lock")
    except BlockingIOError:
        raise ServiceFailed(
            f"another process is {runner_id} in {run_dir}: end it first, or take another replica"
        ) from None
    try:
        yield
    finally:
        lock.release()
