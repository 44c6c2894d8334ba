"""Versions on disk: `<root>/<version>/` holds `manifest.json` and one safetensors file a rank.

A version that is being published lies in `<root>/.open-<version>/` and becomes visible by one rename. Nothing writes
to it after that. The index in memory is rebuilt from the directory at start.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import ClassVar

import structlog
from google.protobuf import json_format

from slipstream.api.broadcast.v1 import broadcast_pb2
from slipstream.broadcaster.shard_file import ShardWriter
from slipstream.common.disk import full_disk_named, no_file, replace_file
from slipstream.common.errors import (
    BroadcastStoreFull,
    InvalidRequest,
    OffsetOutOfRange,
    ShardsMissing,
    SliceUnknown,
    Unsupported,
    VersionNotNewer,
    VersionNotOpen,
    VersionSealed,
    WeightVersionUnknown,
)
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.weights.adapter import Adapter
from slipstream.weights.manifest import Manifest, Probe, Source, WeightSlice, check_geometry

log = structlog.get_logger()

_OPEN_PREFIX = ".open-"
_MANIFEST = "manifest.json"

MAX_RANKS = 65_536
MAX_OPEN = 8
"""Versions open at once; another one takes the place of the one that was opened first."""
NAMED_RANKS = 16
"""Most ranks an error names: what goes with a status must stay small."""


@dataclass(frozen=True)
class Extent:
    """Consecutive bytes of a file."""

    path: Path
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class Elsewhere:
    """A shard whose bytes its rank keeps."""

    slices: tuple[WeightSlice, ...]
    source: str

    size_bytes: ClassVar[int] = 0
    """On this disk."""


@dataclass
class OpenVersion:
    """A version that is being published."""

    version: PolicyVersion
    rank_count: int
    directory: Path
    shards: dict[int, ShardWriter | Elsewhere] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredVersion:
    """A sealed version and where its slices lie."""

    manifest: Manifest
    extents: tuple[Extent, ...]
    """One a slice; of no bytes if they are elsewhere."""

    @property
    def size_bytes(self) -> int:
        """On this disk."""
        return sum(part.size_bytes for part in self.extents)


class VersionStore:
    """The versions of a run. All methods but `ShardWriter`'s are quick; none is thread-safe."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._sealed: dict[PolicyVersion, StoredVersion] = {}
        self._open: dict[PolicyVersion, OpenVersion] = {}
        self._readers: Counter[PolicyVersion] = Counter()
        self._uploads = count()
        self._writing: set[ShardWriter] = set()
        root.mkdir(parents=True, exist_ok=True)
        self.unpruned_for = ""
        """What pruning waits for, if for anything: it may take any time, and then there is room."""
        self._load()

    @property
    def newest(self) -> PolicyVersion | None:
        return max(self._sealed, default=None)

    @property
    def versions(self) -> list[PolicyVersion]:
        """The sealed ones, oldest first."""
        return sorted(self._sealed)

    @property
    def size_bytes(self) -> int:
        """Bytes of all versions; of a shard that is being written, those it will have."""
        shards = (shard for version in self._open.values() for shard in version.shards.values())
        sealed = sum(stored.size_bytes for stored in self._sealed.values())
        return sealed + sum(shard.size_bytes for shard in (*shards, *self._writing))

    def open(self, version: PolicyVersion, rank_count: int) -> None:
        """Begin a version, or begin it again if it is not sealed."""
        if not version:
            raise InvalidRequest("a version has an incarnation of at least 1", field="version")
        if rank_count > MAX_RANKS:
            raise InvalidRequest(f"{MAX_RANKS} ranks at most", field="rank_count", limit=MAX_RANKS)
        if version in self._sealed:
            raise VersionSealed(f"{version} is sealed", version=version)
        if self.newest is not None and version < self.newest:
            raise VersionNotNewer(f"{self.newest} is sealed, which is newer than {version}", newest=self.newest)
        self._check_room(1)
        self._open.pop(version, None)
        while len(self._open) >= MAX_OPEN:
            self._abandon(next(iter(self._open)))
        directory = self._root / f"{_OPEN_PREFIX}{version}"
        with full_disk_named(directory):
            if directory.exists():
                shutil.rmtree(directory)
            directory.mkdir(parents=True)  # somebody may have removed versions/
        self._open[version] = OpenVersion(version, rank_count, directory)

    def begin_shard(self, version: PolicyVersion, rank: int, slices: Sequence[WeightSlice]) -> ShardWriter:
        """A writer for one rank's slices; `commit_shard` makes it part of the version, `drop_shard` gives it up."""
        opened = self._opened(version)
        if rank >= opened.rank_count:
            raise InvalidRequest(f"rank {rank} of {opened.rank_count}", field="rank", limit=opened.rank_count)
        self._check_room(sum(part.size_bytes for part in slices))
        writer = ShardWriter(opened.directory / f"upload-{next(self._uploads)}", slices)
        self._writing.add(writer)
        return writer

    def commit_shard(self, version: PolicyVersion, rank: int, writer: ShardWriter) -> None:
        """Take a finished shard, in place of an earlier one of the same rank."""
        opened = self._opened(version)
        if writer.path.parent != opened.directory or not writer.path.exists():
            raise VersionNotOpen(f"{version} was opened again meanwhile", version=version)
        writer.path = writer.path.replace(opened.directory / _shard_name(rank))
        opened.shards[rank] = writer
        self._writing.discard(writer)

    def put_source(self, version: PolicyVersion, rank: int, slices: Sequence[WeightSlice], source: str) -> None:
        """Take a shard whose bytes its rank keeps, in place of an earlier one of the same rank."""
        opened = self._opened(version)
        if rank >= opened.rank_count:
            raise InvalidRequest(f"rank {rank} of {opened.rank_count}", field="rank", limit=opened.rank_count)
        opened.shards[rank] = Elsewhere(tuple(slices), source)

    def drop_shard(self, writer: ShardWriter) -> None:
        """Forget a writer and what it wrote."""
        self._writing.discard(writer)
        writer.discard()

    def seal(self, version: PolicyVersion, probe: Probe | None, adapter: Adapter | None = None) -> Manifest:
        """Make a version visible. A repeat answers the same."""
        if version in self._sealed:
            return self._sealed[version].manifest
        opened = self._opened(version)
        missing = [rank for rank in range(opened.rank_count) if rank not in opened.shards]
        if missing:
            named = [str(rank) for rank in missing[:NAMED_RANKS]]
            ranks = ",".join(named if len(missing) <= NAMED_RANKS else [*named, "..."])
            raise ShardsMissing(f"ranks {ranks} have not published {version}", missing_ranks=ranks)
        if self.newest is not None and version < self.newest:
            raise VersionNotNewer(f"{self.newest} was sealed meanwhile", newest=self.newest)
        if adapter is not None and adapter.base_version not in (version, *self._sealed):
            base = adapter.base_version
            raise WeightVersionUnknown(f"{base} is not here, which {version} is added to", version=base)
        shards = [opened.shards[rank] for rank in range(opened.rank_count)]
        slices = tuple(part for shard in shards for part in shard.slices)
        check_geometry(slices)
        sources = tuple(Source(len(s.slices), s.source if isinstance(s, Elsewhere) else "") for s in shards)
        if not any(source.address for source in sources):
            sources = ()
        manifest = Manifest(version, slices, probe, int(time.time() * 1000), adapter, sources)
        document = {
            "manifest": json_format.MessageToDict(manifest.to_proto(), preserving_proto_field_name=True),
            "shards": [
                {"slice_count": len(s.slices), "data_offset_bytes": s.data_offset_bytes}
                if isinstance(s, ShardWriter)
                else {"slice_count": len(s.slices), "source": s.source}
                for s in shards
            ],
        }
        replace_file(opened.directory / _MANIFEST, json.dumps(document).encode() + b"\n")
        target = self._root / str(version)
        shutil.rmtree(target, ignore_errors=True)  # a remnant that could not be read at start
        with full_disk_named(target):
            opened.directory.rename(target)
            self._sealed[version] = _read_version(target)
        del self._open[version]
        return manifest

    def manifest(self, version: PolicyVersion | None = None) -> Manifest:
        """The manifest of a sealed version, the newest by default."""
        return self._stored(self.newest or UNSET if version is None else version).manifest

    def extents(self, version: PolicyVersion, slice_indexes: Sequence[int]) -> list[Extent]:
        """Where the slices lie, in the order asked, neighbours joined. All of them when none is named."""
        stored = self._stored(version)
        joined: list[Extent] = []
        for index in slice_indexes or range(len(stored.extents)):
            if index >= len(stored.extents):
                raise SliceUnknown(f"{version} has {len(stored.extents)} slices", slice_index=index)
            part = stored.extents[index]
            if not part.size_bytes:
                raise Unsupported(f"the bytes of {version} are with the trainer", version=version)
            last = joined[-1] if joined else None
            if last and last.path == part.path and last.offset_bytes + last.size_bytes == part.offset_bytes:
                joined[-1] = Extent(last.path, last.offset_bytes, last.size_bytes + part.size_bytes)
            else:
                joined.append(part)
        return joined

    @contextmanager
    def reading(self, version: PolicyVersion) -> Iterator[None]:
        """Keep a version from being pruned meanwhile."""
        self._readers[version] += 1
        try:
            yield
        finally:
            self._readers[version] -= 1
            self._readers += Counter()  # drops the zeros

    def prune(self, keep_count: int, needed: Collection[PolicyVersion]) -> list[PolicyVersion]:
        """Drop versions but the newest `keep_count`, those `needed`, those being read, and what these are added to."""
        newest = self.versions[-keep_count:]
        kept = {v for v in self.versions if v in newest or v in needed or self._readers[v]}
        adapters = (self._sealed[version].manifest.adapter for version in tuple(kept))
        kept |= {adapter.base_version for adapter in adapters if adapter is not None}
        gone = [v for v in self.versions if v not in kept and _removed(self._root / str(v))]
        for version in gone:
            del self._sealed[version]
        for version in [v for v in self._open if self.newest is not None and v < self.newest]:
            self._abandon(version)  # it can never be sealed
        return gone

    def _abandon(self, version: PolicyVersion) -> None:
        shutil.rmtree(self._open.pop(version).directory, ignore_errors=True)

    def _opened(self, version: PolicyVersion) -> OpenVersion:
        if version in self._sealed:
            raise VersionSealed(f"{version} is sealed", version=version)
        opened = self._open.get(version)
        if opened is None:
            raise VersionNotOpen(f"{version} is not open", version=version)
        return opened

    def _stored(self, version: PolicyVersion) -> StoredVersion:
        stored = self._sealed.get(version)
        if stored is None:
            raise WeightVersionUnknown(f"{version} is not here", version=version, newest=self.newest or "")
        return stored

    def _check_room(self, size_bytes: int) -> None:
        if self.size_bytes + size_bytes > self._limit_bytes:
            raise BroadcastStoreFull(
                f"{size_bytes} more bytes do not fit (broadcaster.max_store_bytes)",
                name="broadcaster.max_store_bytes",
                limit_bytes=self._limit_bytes,
                waits_for=self.unpruned_for,
            )

    def _load(self) -> None:
        for directory in sorted(self._root.iterdir()):
            if directory.name.startswith(_OPEN_PREFIX):
                shutil.rmtree(directory, ignore_errors=True)  # its publisher starts over
                continue
            try:
                stored = _read_version(directory)
            except (OSError, ValueError, KeyError, json_format.ParseError) as error:
                log.warning("version_unreadable", path=str(directory), detail=str(error))
                continue
            self._sealed[stored.manifest.version] = stored


def skip_bytes(extents: Sequence[Extent], offset_bytes: int) -> list[Extent]:
    """What is left of `extents` after `offset_bytes` of them."""
    total = sum(part.size_bytes for part in extents)
    if offset_bytes > total:
        raise OffsetOutOfRange(f"offset {offset_bytes} is beyond {total}", size_bytes=total)
    rest = []
    for part in extents:
        skipped = min(offset_bytes, part.size_bytes)
        offset_bytes -= skipped
        if skipped < part.size_bytes:
            rest.append(Extent(part.path, part.offset_bytes + skipped, part.size_bytes - skipped))
    return rest


def _shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _removed(directory: Path) -> bool:
    """Remove a directory as far as that goes; False where it cannot be opened now, so that all of it is there yet."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        if no_file(error):
            return False
        shutil.rmtree(directory, ignore_errors=True)
    return True


def _read_version(directory: Path) -> StoredVersion:
    document = json.loads((directory / _MANIFEST).read_text())
    message = json_format.ParseDict(document["manifest"], broadcast_pb2.Manifest())
    manifest = Manifest.from_proto(message)
    if str(manifest.version) != directory.name:
        raise ValueError(f"the manifest is of {manifest.version}")
    extents: list[Extent] = []
    slices = iter(manifest.slices)
    for rank, shard in enumerate(document["shards"]):
        path = directory / _shard_name(rank)
        if "source" in shard:
            extents += [Extent(path, 0, 0) for _ in islice(slices, shard["slice_count"])]
            continue
        at = shard["data_offset_bytes"]
        for _ in range(shard["slice_count"]):
            size = next(slices).size_bytes
            extents.append(Extent(path, at, size))
            at += size
        if path.stat().st_size != at:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {at}")
    return StoredVersion(manifest, tuple(extents))
