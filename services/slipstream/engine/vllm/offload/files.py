"""KV blocks as files, shared by the workers of a host and bounded in bytes.

    <directory>/usage                                    bytes held, changed under `lock`
    <directory>/runs/<run>/live/<name>                   locked by an engine for as long as it lives
    <directory>/runs/<run>/<salt>/versions/<version>     weights that wrote under the salt
    <directory>/runs/<run>/<salt>/<layout>/<xx>/<key>    one block: header, KV, routes

A file that is cut short, changed or of another layout or salt is a miss, counted and removed. Whoever ends a salt
removes its files; whoever starts removes those of runs that no living engine serves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.vllm.offload.blocks import HEADER, header_of, run_of, salt_digest

FULL_PAUSE_S = 5.0
"""After a disk was full nothing is written for this long."""
EVICT_TO = 0.9
"""Share of the bound that an eviction leaves, so that it is not made for each block."""
_PARTIAL = ".partial"
"""Of a file that is being written: it is locked until it has its name, or it was left behind."""
_USAGE = struct.Struct("<Q")


class BlockFiles:
    """Blocks of one layout in a directory that others use too. All methods may be called from several threads."""

    def __init__(self, directory: Path, limit_bytes: int, layout: bytes) -> None:
        self._root = directory
        self._runs = directory / "runs"
        self._limit_bytes = limit_bytes
        self._layout = layout
        self._full_until_s = 0.0
        self.rejected_files = 0
        """Files that were not what their name says."""
        self.failed_writes = 0
        """Blocks that were not written: the disk was full, or broken."""
        self.read_bytes = self.written_bytes = 0
        self._runs.mkdir(parents=True, exist_ok=True)
        self._usage = os.open(directory / "usage", os.O_RDWR | os.O_CREAT, 0o600)
        with self._locked():
            if os.fstat(self._usage).st_size < _USAGE.size:
                self._set_usage(0)

    def close(self) -> None:
        os.close(self._usage)

    # --- Blocks --------------------------------------------------------------------------------------

    def has(self, salt: str, key: bytes) -> bool:
        return self._path(salt, key).exists()

    def write(self, salt: str, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Keep a block; False if it could not be. One that is there already stays."""
        path = self._path(salt, key)
        if path.exists():
            return True
        if time.monotonic() < self._full_until_s:
            self.failed_writes += 1
            return False
        header = header_of(self._layout, salt, key, parts)
        size = len(header) + sum(part.nbytes for part in parts)
        if not self._reserve(size):
            self.failed_writes += 1
            return False
        partial = path.parent / f"{uuid4().hex}{_PARTIAL}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                for part in (header, *parts):
                    file.write(part)
                file.flush()
                os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._count(-size)
            self.failed_writes += 1
            if not isinstance(error, FileNotFoundError):  # that is a salt that has just ended
                self._full_until_s = time.monotonic() + FULL_PAUSE_S
            return False
        self.written_bytes += size
        return True

    def read(self, salt: str, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill `parts` with a block. False: there is none, or none that can be trusted; `parts` hold anything then."""
        path = self._path(salt, key)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(HEADER.size)
                complete = all(_fill(file, part) for part in parts) and not file.read(1)
        except OSError:
            return False
        if not complete or header != header_of(self._layout, salt, key, parts):
            self.rejected_files += 1
            self._remove(path)
            return False
        self.read_bytes += len(header) + sum(part.nbytes for part in parts)
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now
        return True

    # --- Salts and runs ------------------------------------------------------------------------------

    def use(self, salt: str, version: PolicyVersion) -> None:
        """Weights of this version may write under the salt from now on."""
        marker = self._salt(salt) / "versions" / f"{version.incarnation}-{version.step}"
        with contextlib.suppress(OSError):  # a full disk: nothing will be written either
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def oldest(self, salt: str) -> PolicyVersion:
        """The oldest weights that any engine used a salt with; unset if there are none."""
        with contextlib.suppress(OSError):
            names = os.listdir(self._salt(salt) / "versions")
            versions = [PolicyVersion(int(one), int(two)) for one, _, two in (name.partition("-") for name in names)]
            return min(versions, default=UNSET)
        return UNSET

    def end(self, salt: str) -> int:
        """Remove what is kept under a salt; returns the bytes freed."""
        return self._remove_tree(self._salt(salt))

    def salt_bytes(self, salt: str) -> int:
        return sum(size for _, _, size in _files(self._salt(salt)))

    @contextlib.contextmanager
    def living(self, run: str) -> Iterator[None]:
        """This engine serves a run. At the start of it all runs that nobody serves are removed, but this one."""
        directory = self._run(run) / "live"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / uuid4().hex
        with path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with self._locked():
                self._remove_gone_runs()
                self._set_usage(self._evict(self._limit_bytes))
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _remove_gone_runs(self) -> None:
        for run in self._runs.iterdir():
            lives = list((run / "live").glob("*")) if (run / "live").is_dir() else []
            if not any(_is_locked(path) for path in lives):
                shutil.rmtree(run, ignore_errors=True)
            else:
                for path in lives:
                    if not _is_locked(path):
                        path.unlink(missing_ok=True)

    # --- The bound -----------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Of all users of the directory."""
        return _USAGE.unpack(os.pread(self._usage, _USAGE.size, 0))[0]

    def _reserve(self, size: int) -> bool:
        """Make room for a file and count it; False if it can have none."""
        if size > self._limit_bytes:
            return False
        try:
            with self._locked():
                used = self.used_bytes
                if used + size > self._limit_bytes:
                    used = self._evict(max(0, round(self._limit_bytes * EVICT_TO) - size))
                self._set_usage(used + size)
        except OSError:
            return False
        return True

    def _evict(self, target_bytes: int) -> int:
        """Remove the least recently used files, and halves of killed writers; returns the bytes left.

        The caller holds the lock.
        """
        files = sorted(_files(self._runs))
        left = sum(size for _, _, size in files)
        for _, path, size in files:
            written_now = path.name.endswith(_PARTIAL) and _is_locked(path)
            if written_now or (left <= target_bytes and not path.name.endswith(_PARTIAL)):
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                left -= size
        return left

    def _count(self, change: int) -> None:
        with contextlib.suppress(OSError), self._locked():
            self._set_usage(max(0, self.used_bytes + change))

    def _set_usage(self, size: int) -> None:
        os.pwrite(self._usage, _USAGE.pack(size), 0)  # in place: no full disk can refuse it

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._count(-size)

    def _remove_tree(self, directory: Path) -> int:
        if not directory.exists():
            return 0
        freed = 0
        for _, path, size in _files(directory):
            with contextlib.suppress(OSError):
                path.unlink()
                freed += size
        shutil.rmtree(directory, ignore_errors=True)
        self._count(-freed)
        return freed

    # --- Names ---------------------------------------------------------------------------------------

    def _run(self, run: str) -> Path:
        return self._runs / (quote(run, safe="") or "-").replace(".", "%2E")

    def _salt(self, salt: str) -> Path:
        return self._run(run_of(salt)) / salt_digest(salt).hex()[:32]

    def _path(self, salt: str, key: bytes) -> Path:
        name = key.hex()
        return self._salt(salt) / self._layout.hex()[:16] / name[:2] / name


def _fill(file: object, part: memoryview) -> bool:
    """Read until `part` is full; False at the file's end."""
    view, filled = part.cast("B"), 0
    while filled < len(view):
        count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            return False
        filled += count
    return True


def _files(directory: Path) -> Iterator[tuple[float, Path, int]]:
    """(last use, path, bytes) of the blocks below a directory; what goes away meanwhile is left out."""
    stack = [directory]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            if entry.name not in ("live", "versions"):
                                stack.append(Path(entry.path))
                        else:
                            stat = entry.stat(follow_symlinks=False)
                            yield stat.st_mtime, Path(entry.path), stat.st_size
        except OSError:
            continue


def _is_locked(path: Path) -> bool:
    """Whether a living process holds a file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
