"""One supervised operating-system process: started so that it dies with the launcher, and reaped whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.common.disk import numbered
from slipstream.common.exits import REFUSED
from slipstream.launcher import child

Ready = Callable[[], Awaitable[bool]]


async def always_ready() -> bool:
    return True


@dataclass(frozen=True)
class ProcessSpec:
    """What to run as one replica, and how to tell that it is up."""

    replica: str
    command: tuple[str, ...]
    log_file: Path
    """The file to name when it dies."""
    output_file: Path
    """Where its standard output and error go, appended over restarts."""
    ready: Ready = always_ready
    """Asked again and again after the start, until true."""
    always_restart: bool = False
    """Restarted whatever the policy says: it keeps nothing that cannot be rebuilt."""
    resumable: bool = True
    """Whether a new process can go on where it was; without, its death ends the run whatever the policy says."""
    group: str = ""
    """Processes of one name here are one thing: when one of them dies, the others are ended, and all start again."""
    stops_last: bool = False
    """Asked to stop only when the others have, since they need it to drain."""


class SupervisedProcess:
    """A running replica. Leads its own process group, so that what it left behind can be killed."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.started_s = time.monotonic()
        command = child.guarded(spec.command)
        with spec.output_file.open("ab") as output:
            # Must be the main thread: the parent-death signal fires when the spawning *thread* ends.
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def limit_output(self, limit_bytes: int, kept_files: int) -> None:
        """Move the end of what it printed to `<name>.1` once it is long; the process has the file open and keeps it.

        What it prints between the copy and the cut is lost; on a full disk the copy is.
        """
        path = self.spec.output_file
        with contextlib.suppress(OSError):
            size_bytes = path.stat().st_size
            if size_bytes <= limit_bytes:
                return
            if kept_files:
                staged = path.with_name(f"{path.name}.new")
                try:
                    with path.open("rb") as printed, staged.open("wb") as kept:
                        printed.seek(max(size_bytes - limit_bytes, 0))  # gigabytes, maybe, since the last look
                        kept.write(printed.read(limit_bytes))
                    staged.replace(numbered(path, 1))
                except OSError:
                    staged.unlink(missing_ok=True)
            os.truncate(path, 0)

    def exit_reason(self) -> str | None:
        """Reap the process if it has ended, with the rest of its group; None while it runs."""
        if self._popen.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is None:
                return None
            # Before the reaping, while the number cannot yet name somebody else's group.
            self.signal(signal.SIGKILL)
        code = self._popen.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    @property
    def refused(self) -> bool:
        """Whether it ended since what it was given cannot be used, as our own services say it (`exits.py`)."""
        return self._popen.returncode == REFUSED and not self.spec.always_restart

    def signal(self, number: signal.Signals) -> None:
        """Signal the service; SIGKILL goes to its whole group."""
        if self._popen.returncode is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def wait(self) -> None:
        """Wait for a process that was sent SIGKILL."""
        self._popen.wait()
