"""Files that only grow, on a disk that may fill up or lose them.

Nothing here leaves part of a record behind: what does not fit as a whole is taken back. A disk without room is
`DiskFull`, which its writer outlives: records wait in memory (`PatientFile`), whole files are written again later.
A process that may open no more files waits the same way: `TooManyFiles` is a `DiskFull`.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.common.errors import DiskFull, TooManyFiles

RETRY_S = 0.25
"""Pause before what found no room is written again, in seconds."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_FILE = frozenset({errno.EMFILE, errno.ENFILE})
_REMOVED = frozenset({errno.ENOENT, errno.ESTALE})


def no_room(error: BaseException) -> bool:
    """Whether an error says that the disk, or the quota, is full, or that no more files may be open."""
    return isinstance(error, OSError) and error.errno in _NO_ROOM | _NO_FILE


def no_file(error: BaseException) -> bool:
    """Whether an error says that no more files may be open."""
    return isinstance(error, OSError) and error.errno in _NO_FILE


def shortage(error: OSError, path: object) -> DiskFull | None:
    """What an error of the system says there is too little of, in our words."""
    if no_file(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        where = "this process (ulimit -n)" if error.errno == errno.EMFILE else "this machine (fs.file-max)"
        return TooManyFiles(f"{path}: too many files and connections are open in {where}", path=path, limit=limit)
    return DiskFull(f"the disk of {path} is full", path=path) if no_room(error) else None


@contextmanager
def full_disk_named(path: Path) -> Generator[None, None, None]:
    """Raise `DiskFull`, or `TooManyFiles`, for an `OSError` of the block that says so."""
    try:
        yield
    except OSError as error:
        named = shortage(error, path)
        if named is None:
            raise
        raise named from error


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` lies."""
    usage = os.statvfs(path)
    return usage.f_bavail * usage.f_frsize


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file, on disk before it takes its name; what was there stays if that fails. Blocks.

    Raises:
        DiskFull: there is no room.
    """
    staged = path.with_name(path.name + ".new")
    try:
        with full_disk_named(path), staged.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with full_disk_named(path):
            staged.replace(path)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Have a directory there, parents included. Raises `DiskFull`."""
    with full_disk_named(path):
        path.mkdir(parents=True, exist_ok=True)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def name_directory(made: Path, path: Path) -> None:
    """Give a directory whose files are on disk its name, for good: an outage leaves the whole of it or nothing. Blocks.

    Raises:
        DiskFull: there is no room.
    """
    sync_directory(made)
    with full_disk_named(path):
        made.rename(path)
    sync_directory(path.parent)


class AppendFile:
    """Appends whole records to a file that is made again when somebody removes it.

    Beyond `limit_bytes` (0 means no bound) it becomes `<name>.1`, that one `<name>.2`, up to `kept_files`; the oldest
    goes. So the disk holds `limit_bytes * (kept_files + 1)` and one record at most. Several processes may append to
    one file: each notices when another has moved it.
    """

    def __init__(self, path: Path, limit_bytes: int = 0, kept_files: int = 1) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.kept_files = kept_files
        self._fd = -1
        self._inode = (-1, -1)
        self._torn = False

    def append(self, data: bytes) -> None:
        """Write one record, or several, whole.

        Raises:
            DiskFull: there is no room; nothing of it is in the file.
        """
        with full_disk_named(self.path):
            size_bytes = self._ready(len(data))
            if self._torn:
                data = b"\n" + data
            written = 0
            try:
                while written < len(data):
                    written += os.write(self._fd, memoryview(data)[written:])
            except OSError:
                if written:
                    self._take_back(size_bytes, written)
                raise
            self._torn = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ready(self, more_bytes: int) -> int:
        """Have the file open under its name, with room below its bound; returns its size."""
        size_bytes = self._open_size()
        if self.limit_bytes and size_bytes and size_bytes + more_bytes > self.limit_bytes:
            self._rotate()
            size_bytes = self._open_size()
        return size_bytes

    def _open_size(self) -> int:
        try:
            found = os.stat(self.path)
        except OSError as error:
            if error.errno not in _REMOVED:
                raise
            found = None
        if found is None or self._fd < 0 or (found.st_dev, found.st_ino) != self._inode:
            self.close()
            make_directory(self.path.parent)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            found = os.fstat(self._fd)
            self._inode = (found.st_dev, found.st_ino)
        return found.st_size

    def _rotate(self) -> None:
        for number in range(self.kept_files, 0, -1):
            older = numbered(self.path, number - 1)
            with suppress(FileNotFoundError):
                older.replace(numbered(self.path, number))
        if not self.kept_files:
            self.path.unlink(missing_ok=True)

    def _take_back(self, size_bytes: int, written: int) -> None:
        """Cut a part of a record off; where another process has written since, the next record ends it."""
        if os.fstat(self._fd).st_size == size_bytes + written:
            os.ftruncate(self._fd, size_bytes)
        else:
            self._torn = True


def numbered(path: Path, number: int) -> Path:
    """Name of the `number`-th older file; 0 is the file itself."""
    return path.with_name(f"{path.name}.{number}") if number else path


def with_older(path: Path) -> list[Path]:
    """A file with what was moved out of it, oldest first."""
    older = [p for p in path.parent.glob(f"{path.name}.*") if p.name.removeprefix(f"{path.name}.").isdecimal()]
    return [*sorted(older, key=lambda p: -int(p.name.rpartition(".")[2])), path]


class PatientFile:
    """An `AppendFile` whose records wait in memory, in order, while the disk has no room for them.

    Beyond `buffer_bytes` the newest are dropped and counted. Who must not lose any stops its sources before.
    """

    def __init__(self, file: AppendFile, buffer_bytes: int) -> None:
        self.file = file
        self.buffer_bytes = buffer_bytes
        self.waiting_bytes = 0
        self.dropped_count = 0
        self._waiting: deque[bytes] = deque()

    @property
    def stuck(self) -> bool:
        """Whether records wait for room."""
        return bool(self._waiting)

    def write(self, record: bytes) -> None:
        """Append a record, now or when there is room."""
        if self.flush():
            try:
                self.file.append(record)
                return
            except DiskFull:
                pass
        if self.waiting_bytes + len(record) > self.buffer_bytes:
            self.dropped_count += 1
            return
        self._waiting.append(record)
        self.waiting_bytes += len(record)

    def flush(self) -> bool:
        """Write what waits; False while there is no room."""
        while self._waiting:
            try:
                self.file.append(self._waiting[0])
            except DiskFull:
                return False
            self.waiting_bytes -= len(self._waiting.popleft())
        return True

    def close(self) -> None:
        """Try once more, then close; what then still waits is dropped and counted."""
        if not self.flush():
            self.dropped_count += len(self._waiting)
            self._waiting.clear()
        self.file.close()


class LogFile:
    """A text file for log lines, from any thread. What cannot be written is dropped and counted, never raised."""

    def __init__(self, path: Path, limit_bytes: int, kept_files: int) -> None:
        self.dropped_count = 0
        self._file = AppendFile(path, limit_bytes, kept_files)
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            try:
                if self.dropped_count:
                    self._file.append(
                        b'{"event":"log_lines_dropped","level":"warning","count":%d}\n' % self.dropped_count
                    )
                    self.dropped_count = 0
                self._file.append(data)
            except (DiskFull, OSError):
                self.dropped_count += 1
        return len(text)

    def flush(self) -> None:
        """Nothing: every line is with the kernel at once."""
