"""Cgroups, one a place, kept over programs: moving a process takes the kernel ten milliseconds, staying none.

Version 1 (and hybrid): the place's thread sits in the group, so what it starts is born there. Version 2 has no
threads in groups that count memory: there the gate is moved. Either way the kernel holds memory and processes to
their limits, and its counters say which one was hit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import structlog

log = structlog.get_logger()

PREFIX = "slipstream-sandbox-"
V1_CONTROLLERS = ("memory", "pids", "cpuacct")
# In the place's group beside the program, version 1: the place's thread and bubblewrap outside the jail.
V1_COMPANIONS = 2
REMOVE_TRIES = 50
REMOVE_PAUSE_S = 0.01


@dataclass
class Usage:
    """What a group has counted; the events since it was made."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    """In use now, page cache included."""
    memory_peak_bytes: int = 0
    """Most in use since `limit`; 0 where the kernel keeps no such figure."""
    out_of_memory_count: int = 0
    process_limit_count: int = 0


class PlaceGroup(Protocol):
    """The cgroup of one place."""

    companions: int
    """Tasks in the group that are not the program's."""

    def enter(self) -> None:
        """Put the calling thread in, if that is how programs get there. As root, before it becomes somebody else."""
        ...

    def limit(self, memory_bytes: int, process_count: int) -> None:
        """Set the limits of the next program."""
        ...

    def add(self, pid: int) -> None:
        """Put a process in, if it was not born there."""
        ...

    def usage(self) -> Usage: ...

    def close(self) -> None:
        """Remove the group, which must be empty but for ended threads."""
        ...


class _Files:
    """Control files opened once, as root: later reads and writes need no right of their own."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def open(self, path: Path, flags: int = os.O_RDWR) -> None:
        self._descriptors[path] = os.open(path, flags | os.O_CLOEXEC)

    def read(self, path: Path) -> str:
        return os.pread(self._descriptors[path], 4096, 0).decode()

    def write(self, path: Path, value: int) -> None:
        os.pwrite(self._descriptors[path], str(value).encode(), 0)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class V1Group:
    """A group in each of three hierarchies."""

    companions = V1_COMPANIONS

    def __init__(self, parents: dict[str, Path], name: str) -> None:
        self._folders = {controller: parent / name for controller, parent in parents.items()}
        self._files = _Files()
        for folder in self._folders.values():
            folder.mkdir(exist_ok=True)
        memory, pids, cpu = (self._folders[name] for name in V1_CONTROLLERS)
        self._limit, self._used = memory / "memory.limit_in_bytes", memory / "memory.usage_in_bytes"
        self._peak, self._reclaim = memory / "memory.max_usage_in_bytes", memory / "memory.force_empty"
        self._oom, self._pids, self._hits = memory / "memory.oom_control", pids / "pids.max", pids / "pids.events"
        self._cpu = cpu / "cpuacct.usage"
        for path in (self._limit, self._peak, self._pids):
            self._files.open(path)
        self._files.open(self._reclaim, os.O_WRONLY)
        for path in (self._used, self._oom, self._hits, self._cpu):
            self._files.open(path, os.O_RDONLY)
        (memory / "memory.swappiness").write_text("0")

    def enter(self) -> None:
        for folder in self._folders.values():
            (folder / "tasks").write_text(str(threading.get_native_id()))

    def limit(self, memory_bytes: int, process_count: int) -> None:
        try:
            self._files.write(self._limit, memory_bytes)
        except OSError:  # the last program's page cache is above a lower limit
            self._files.write(self._reclaim, 0)
            self._files.write(self._limit, memory_bytes)
        self._files.write(self._peak, 0)
        self._files.write(self._pids, process_count + self.companions)

    def add(self, pid: int) -> None:
        """Nothing: it was born here."""

    def usage(self) -> Usage:
        return Usage(
            cpu_s=int(self._files.read(self._cpu)) / 1e9,
            memory_bytes=int(self._files.read(self._used)),
            memory_peak_bytes=int(self._files.read(self._peak)),
            out_of_memory_count=_field(self._files.read(self._oom), "oom_kill"),
            process_limit_count=_field(self._files.read(self._hits), "max"),
        )

    def close(self) -> None:
        self._files.close()
        for folder in self._folders.values():
            _remove(folder)


class V2Group:
    """A leaf of the unified hierarchy."""

    companions = 0

    def __init__(self, parent: Path, name: str) -> None:
        self._folder = parent / name
        self._folder.mkdir(exist_ok=True)
        self._files = _Files()
        for file in ("memory.max", "pids.max"):
            self._files.open(self._folder / file)
        self._files.open(self._folder / "cgroup.procs", os.O_WRONLY)
        for file in ("memory.current", "memory.events", "pids.events", "cpu.stat"):
            self._files.open(self._folder / file, os.O_RDONLY)
        for file, value in (("memory.oom.group", "1"), ("memory.swap.max", "0")):
            if (self._folder / file).exists():
                (self._folder / file).write_text(value)

    def enter(self) -> None:
        """Nothing: the gate is moved."""

    def limit(self, memory_bytes: int, process_count: int) -> None:
        self._files.write(self._folder / "memory.max", memory_bytes)
        self._files.write(self._folder / "pids.max", process_count)

    def add(self, pid: int) -> None:
        self._files.write(self._folder / "cgroup.procs", pid)

    def usage(self) -> Usage:
        read = self._files.read
        return Usage(
            cpu_s=_field(read(self._folder / "cpu.stat"), "usage_usec") / 1e6,
            memory_bytes=int(read(self._folder / "memory.current")),
            out_of_memory_count=_field(read(self._folder / "memory.events"), "oom_kill"),
            process_limit_count=_field(read(self._folder / "pids.events"), "max"),
        )

    def close(self) -> None:
        self._files.close()
        _remove(self._folder)


class CgroupTree:
    """Where this executor makes its groups; None from `find` means nowhere."""

    def __init__(self, version: int, parents: dict[str, Path]) -> None:
        self.version = version
        self._parents = parents

    @classmethod
    def find(cls, cgroups: str, mountinfo: str, pid: int) -> Self | None:
        """Look for a writable hierarchy, given the texts of /proc/self/cgroup and /proc/self/mountinfo."""
        own = _own_paths(cgroups)
        mounts = _mounts(mountinfo)
        try:
            if all(controller in mounts and controller in own for controller in V1_CONTROLLERS):
                parents = {name: _below(mounts[name], own[name]) for name in V1_CONTROLLERS}
                for parent in parents.values():
                    _remove_left_beside(parent)
                return cls(1, {name: _make(parent, pid) for name, parent in parents.items()})
            if "" in mounts and "" in own:
                parent = _below(mounts[""], own[""])
                if not {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
                    (parent / "cgroup.subtree_control").write_text("+memory +pids")
                folder = _make(parent, pid)
                (folder / "cgroup.subtree_control").write_text("+memory +pids")
                return cls(2, {"": folder})
        except OSError as error:
            log.info("cgroup_not_writable", detail=str(error))
        return None

    def place(self, index: int) -> PlaceGroup:
        if self.version == 1:
            return V1Group(self._parents, str(index))
        return V2Group(self._parents[""], str(index))

    def close(self) -> None:
        for folder in self._parents.values():
            _remove(folder)


def _make(parent: Path, pid: int) -> Path:
    """This executor's folder. Those of executors that were killed are removed, with whatever still sits there."""
    for old in parent.glob(f"{PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(PREFIX)).exists():
            for child in [path for path in old.iterdir() if path.is_dir()]:
                _kill_tasks(child)
                _remove(child)
            _remove(old)
    folder = parent / f"{PREFIX}{pid}"
    folder.mkdir(exist_ok=True)
    return folder


def _remove_left_beside(parent: Path) -> None:
    """Remove the empty folders that killed executors left in groups beside ours, as a service manager makes them.

    Version 1 alone: there a place's thread sits in its folder for life, so the kernel refuses to remove one in use.
    """
    for old in parent.parent.glob(f"*/{PREFIX}*"):
        with suppress(OSError):
            if not Path("/proc", old.name.removeprefix(PREFIX)).exists():
                for folder in (*(path for path in old.iterdir() if path.is_dir()), old):
                    folder.rmdir()


def _kill_tasks(folder: Path) -> None:
    # 0 stands for a process of another PID namespace; to kill(2) it would mean our own group.
    for pid in set((folder / "cgroup.procs").read_text().split()) - {"0"}:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _remove(folder: Path) -> None:
    """Remove a group. Blocks a moment: a thread that was joined leaves its group only a little later."""
    for _ in range(REMOVE_TRIES):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(REMOVE_PAUSE_S)
        else:
            return
    log.warning("cgroup_left", folder=str(folder))


def _own_paths(cgroups: str) -> dict[str, str]:
    """Controller -> path of this process; "" is the unified hierarchy."""
    own = {}
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    return own


def _mounts(mountinfo: str) -> dict[str, tuple[Path, str]]:
    """Controller -> (mount point, path of the group mounted there); "" is the unified hierarchy."""
    mounts = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            mounts[""] = (Path(point), root)
        elif kind == "cgroup":
            mounts.update(dict.fromkeys(options.split(","), (Path(point), root)))
    return mounts


def _below(mount: tuple[Path, str], own: str) -> Path:
    """The folder of group `own`. A container may see a mount of its own group under the host's name of it."""
    point, root = mount
    relative = own.removeprefix(root) if root != "/" and own.startswith(root) else own
    return point / relative.strip("/")


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
