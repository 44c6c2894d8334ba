"""The executor: makes the places when the service starts, tries the jail once, removes everything when it stops."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from slipstream.common.errors import SandboxBroken
from slipstream.sandbox.cgroup import CgroupTree
from slipstream.sandbox.config import SandboxConfig
from slipstream.sandbox.execution import ExecPool
from slipstream.sandbox.jail import find_bubblewrap, host_python
from slipstream.sandbox.leases import SandboxTable
from slipstream.sandbox.place import Job, Place, place_uid
from slipstream.sandbox.processes import countable
from slipstream.sandbox.program import Ended, KillSwitch, Limits, Outcome, Program
from slipstream.sandbox.servicer import SandboxServicer
from slipstream.sandbox.warden import Warden

log = structlog.get_logger()

TRIAL = Program(
    argv=["python3", "-I", "-S", "-c", "print('ready')"],
    limits=Limits(wall_s=20.0, cpu_s=10.0, memory_bytes=2**27, process_count=8, output_bytes=2**16, tmp_bytes=2**20),
)
TRIAL_TIMEOUT_S = 30.0


class Executor:
    """What the service's process owns: places, sandboxes, and the servicer over both."""

    def __init__(self, config: SandboxConfig, places: list[Place], accounting: str) -> None:
        self.accounting = accounting
        self.table = SandboxTable(config.max_sandboxes, config.sweep_interval_s, config.max_all_files_bytes)
        self.pool = ExecPool(places, config.max_waiting_execs)
        own_uid = all(place.own_uid for place in places)
        self.servicer = SandboxServicer(config, self.table, self.pool, accounting, own_uid)


@contextmanager
def open_executor(config: SandboxConfig) -> Iterator[Executor]:
    """Start the places and try the jail; stop and clean up on leaving. Blocks. Raises `SandboxBroken`."""
    _close_on_exec()
    cgroups = _find_cgroups(config)
    accounting = "supervisor" if cgroups is None else f"cgroup-v{cgroups.version}"
    if cgroups is None and not countable():
        raise SandboxBroken("no cgroup is writable, and this kernel does not list children in /proc")
    places: list[Place] = []
    warden = Warden()
    try:
        tree, bubblewrap = host_python(), find_bubblewrap(config.bwrap)
        for index in range(config.max_running_execs):
            uid = place_uid(config.uid_base, index, config.max_running_execs)
            place = Place(index, tree, bubblewrap, cgroups.place(index) if cgroups else None, warden, uid)
            places.append(place)
            place.start()
            _try(place)
        log.info("places_ready", count=len(places), accounting=accounting, bubblewrap=str(bubblewrap.program))
        yield Executor(config, places, accounting)
    except OSError as error:
        raise SandboxBroken(f"the jail cannot be made: {error}") from error
    finally:
        for place in places:
            place.stop()
        warden.close()
        if cgroups is not None:
            cgroups.close()


def _find_cgroups(config: SandboxConfig) -> CgroupTree | None:
    if config.accounting == "supervisor":
        return None
    cgroups, mountinfo = (Path("/proc/self", name).read_text() for name in ("cgroup", "mountinfo"))
    return CgroupTree.find(cgroups, mountinfo, os.getpid())


def _try(place: Place) -> None:
    """Run a first program: better to fail at the start than at each call."""
    ends: queue.SimpleQueue[Ended | Exception] = queue.SimpleQueue()
    kill = KillSwitch()
    place.submit(Job(TRIAL, kill, _Nowhere(), ends.put))
    end = ends.get(timeout=TRIAL_TIMEOUT_S)
    kill.close()
    if isinstance(end, Exception):
        raise SandboxBroken(f"the jail cannot be made: {end}") from end
    if end.outcome is not Outcome.EXITED or end.exit_code != 0:
        raise SandboxBroken(f"a first program did not run: {end.outcome.value}, {end.message or end.exit_code}")


class _Nowhere:
    """Output that nobody reads."""

    def write(self, stream: str, data: bytes) -> None:
        """Drop it."""

    def flush(self) -> None:
        """Nobody waits."""


def _close_on_exec() -> None:
    """Whoever started this process may have left descriptors open; no program must see them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                continue  # the listing's own
