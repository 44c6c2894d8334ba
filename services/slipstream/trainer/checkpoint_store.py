"""The checkpoints of a run on disk: `<run_dir>/checkpoints/<version>/`. Imports no torch.

    .saving-2.14/        while it is written; what a dead process left is removed
    2.14/                renamed into place once all of it is on disk
        rank-00000.safetensors ...    tensors, by rank (tensor_files.py)
        metadata.json                 which part of which tensor is where, and each file's checksum
        state.json                    the version, and what else is no tensor
        COMPLETE                      written last: without it, or if it does not fit, there is no checkpoint

A kill at any moment leaves the newest complete one as it was. One of which a byte has changed since is passed over, as
one that is not complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from slipstream.common.crc import crc32
from slipstream.common.disk import make_directory, name_directory, replace_file
from slipstream.common.errors import CheckpointFailed
from slipstream.common.version import PolicyVersion

log = structlog.get_logger()

METADATA_FILE = "metadata.json"
STATE_FILE = "state.json"
MARKER_FILE = "COMPLETE"
INCARNATION_FILE = "incarnation"
CHECKSUM_BYTES = 2**20
"""Read at once for a checksum."""

_SAVING_PREFIX = ".saving-"
_VERSION = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    version: PolicyVersion
    path: Path
    figures: dict[str, float]
    """Of the step that made it."""


class CheckpointStore:
    """Who writes is rank 0; everyone may read."""

    def __init__(self, root: Path, keep_last: int = 1, keep_every_steps: int = 0) -> None:
        self.root = root
        self._keep_last = keep_last
        self._keep_every_steps = keep_every_steps

    def newest(self) -> Saved | None:
        """The newest complete checkpoint: of the latest incarnation, its latest step."""
        for version in reversed(self._versions()):
            saved = self.find(version)
            if saved is not None:
                return saved
        return None

    def find(self, version: PolicyVersion) -> Saved | None:
        """That of a version, if it is complete. What is wrong with one that is damaged goes to the log."""
        path = self.root / str(version)
        if not (path / MARKER_FILE).exists():
            return None
        try:
            return self.whole(version)
        except CheckpointFailed as error:
            log.warning("checkpoint_unreadable", path=str(path), detail=error.message)
            return None

    def whole(self, version: PolicyVersion) -> Saved:
        """That of a version, every byte of it as it was written. Raises `CheckpointFailed` with what is wrong."""
        return _read(self.root / str(version), version)

    def versions(self) -> list[PolicyVersion]:
        """Those of which there is one that looks complete, oldest first."""
        return [v for v in self._versions() if (self.root / str(v) / MARKER_FILE).exists()]

    def at(self, version: PolicyVersion) -> Saved:
        """One that another rank has found complete. Raises `CheckpointFailed` where it is not to be seen here."""
        try:
            return _read(self.root / str(version), version, with_tensors=False)
        except CheckpointFailed as error:
            raise CheckpointFailed(f"rank 0 resumes from one that is not here: {error.message}") from error

    def scratch(self, version: PolicyVersion) -> Path:
        """Where it is written."""
        return self.root / f"{_SAVING_PREFIX}{version}"

    def begin(self, version: PolicyVersion) -> Path:
        """Make an empty directory to write into."""
        scratch = self.scratch(version)
        for left in self.root.glob(f"{_SAVING_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        make_directory(scratch)
        return scratch

    def commit(self, version: PolicyVersion, figures: dict[str, float]) -> None:
        """Make what was written, whose files are on disk, a checkpoint; then drop what need not be kept."""
        scratch, target = self.scratch(version), self.root / str(version)
        state = {"version": str(version), "figures": figures}
        replace_file(scratch / STATE_FILE, json.dumps(state, indent=1).encode() + b"\n")
        shutil.rmtree(target, ignore_errors=True)  # a remnant without its marker
        name_directory(scratch, target)
        checksums = {name: file_checksum(target / name) for name in (METADATA_FILE, STATE_FILE)}
        replace_file(target / MARKER_FILE, json.dumps(checksums).encode() + b"\n")
        self._prune()

    def discard(self, version: PolicyVersion) -> None:
        """Remove what a failed save has left, so that the next one has its room."""
        shutil.rmtree(self.scratch(version), ignore_errors=True)
        target = self.root / str(version)
        if not (target / MARKER_FILE).exists():
            shutil.rmtree(target, ignore_errors=True)

    def open_incarnation(self, least: int) -> int:
        """A number that no process of this run has used before, `least` or more; remembered at once."""
        path = self.root / INCARNATION_FILE
        used = 0
        if path.exists():
            try:
                used = int(path.read_text())
            except ValueError as error:
                raise CheckpointFailed(f"{path} must hold the run's latest incarnation, a number") from error
        make_directory(self.root)
        incarnation = max(least, used + 1)
        replace_file(path, f"{incarnation}\n".encode())
        return incarnation

    def _versions(self) -> list[PolicyVersion]:
        names = os.listdir(self.root) if self.root.is_dir() else []
        return sorted(PolicyVersion.parse(name) for name in names if _VERSION.fullmatch(name))

    def _prune(self) -> None:
        """The newest stay, and those of every so many steps."""
        for version in self.versions()[: -self._keep_last]:
            if self._keep_every_steps and version.step and version.step % self._keep_every_steps == 0:
                continue
            path = self.root / str(version)
            (path / MARKER_FILE).unlink(missing_ok=True)  # first: half of one must not look whole
            shutil.rmtree(path, ignore_errors=True)


def _read(path: Path, version: PolicyVersion, *, with_tensors: bool = True) -> Saved:
    """The checkpoint in a directory. `with_tensors`: look through their files, too. Raises `CheckpointFailed`."""
    found, detail = path, "it has no COMPLETE: it is gone, or was never written to its end"
    try:
        if not (path / MARKER_FILE).exists():
            raise ValueError(detail)
        found = path / MARKER_FILE
        document = json.loads(found.read_text())
        written: dict[str, int] = {name: document[name] for name in (METADATA_FILE, STATE_FILE)}
        for name, checksum in written.items():
            found = path / name
            _check_file(found, checksum)
        state: dict[str, Any] = json.loads(found.read_text())
        if state["version"] != str(version):
            raise ValueError(f"it is of version {state['version']}")
        found = path / METADATA_FILE
        metadata = json.loads(found.read_text())
        for name, checksum in metadata["files"].items() if with_tensors else ():
            found = path / name
            _check_file(found, checksum, metadata.get("sizes", {}).get(name))
        return Saved(version, path, state["figures"])
    except FileNotFoundError:
        detail = "the file is missing"
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        detail = f"it does not hold what it should: {type(error).__name__} {error}"
    except json.JSONDecodeError as error:
        detail = f"it is no JSON: {error}"
    except (OSError, ValueError) as error:
        detail = str(error)
    raise CheckpointFailed(f"{found}: {detail}", path=found)


def _check_file(path: Path, checksum: int, size_bytes: int | None = None) -> None:
    """Raise `ValueError` unless a file is as it was written. Those of older checkpoints have no size on record."""
    has_bytes = path.stat().st_size
    if size_bytes is not None and has_bytes != size_bytes:
        raise ValueError(f"it has {has_bytes} bytes, and {size_bytes} were written")
    has = file_checksum(path)
    if has != checksum:
        raise ValueError(f"its {has_bytes} bytes have the checksum {has:08x}, and those written had {checksum:08x}")


def file_checksum(path: Path) -> int:
    """CRC-32 of a file, which is read a piece at a time."""
    checksum, piece = 0, bytearray(CHECKSUM_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            checksum = crc32(memoryview(piece)[:size], checksum)
    return checksum
