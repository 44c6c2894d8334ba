"""Files that one process at a time holds.

The kernel lets go of such a file when its holder ends, however it ends. A file system without locks guards nobody.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from slipstream.common.disk import full_disk_named

RETRY_S = 0.01
"""Between two attempts to take a lock, in seconds."""


class FileLock:
    """Holds a file until it is released. The file says who holds it, for those who ask.

    `patience_s`: for how long to wait for it, in seconds. Who asks whether a file is held (`holder_of`) has it for a
    moment, so a lock that is asked after needs some.

    Raises:
        BlockingIOError: another process holds it.
        DiskFull: there is no room.
    """

    def __init__(self, path: Path, holder: str | None = None, *, patience_s: float = 0.0) -> None:
        with full_disk_named(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(time.monotonic() + patience_s)
            if holder is not None:
                self.say(holder)
        except BaseException:
            self.release()
            raise

    def _take(self, deadline_s: float) -> None:
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(RETRY_S)
            else:
                return

    def say(self, holder: str) -> None:
        """Write into the file who holds it."""
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, holder.encode(), 0)

    def release(self) -> None:
        os.close(self._handle)


def holder_of(path: Path) -> str | None:
    """What the holder of a file says of itself; None if no process holds it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return path.read_text(errors="replace")
    finally:
        os.close(handle)
    return None
