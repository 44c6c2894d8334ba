"""One rank's slices on disk: a safetensors file, written as the bytes come and checked on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path

from slipstream.common.crc import crc32
from slipstream.common.disk import full_disk_named
from slipstream.common.errors import WeightsCorrupt
from slipstream.weights.manifest import WeightSlice

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def shard_header(slices: Sequence[WeightSlice]) -> bytes:
    """The safetensors header of these slices laid end to end; a part of a tensor is named with its offsets."""
    entries: dict[str, object] = {}
    at = 0
    for part in slices:
        name = part.name if part.whole else f"{part.name}@{','.join(map(str, part.offsets))}"
        span = [at, at + part.size_bytes]
        entries[name] = {"dtype": _DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": span}
        at += part.size_bytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _write(file: RawIOBase, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) or 0 :]


class ShardWriter:
    """Takes a shard's bytes in any pieces. `write` and `finish` block on the disk."""

    def __init__(self, path: Path, slices: Sequence[WeightSlice]) -> None:
        self.path = path
        self.slices = tuple(slices)
        self.size_bytes = sum(part.size_bytes for part in slices)
        header = shard_header(self.slices)
        self.data_offset_bytes = len(header)
        with full_disk_named(path):
            # Unbuffered: what finds no room says so here, not when the file is closed.
            self._file = path.open("xb", buffering=0)
            try:
                _write(self._file, header)
            except OSError:
                self.discard()
                raise
        self._index = 0
        self._in_slice = 0
        self._crc = 0

    def write(self, data: memoryview) -> None:
        """Append bytes; raises `WeightsCorrupt` as soon as a slice's CRC is wrong or bytes are too many.

        Raises `DiskFull`, too: then give the writer up.
        """
        with full_disk_named(self.path):
            _write(self._file, data)
        while len(data):
            if self._index == len(self.slices):
                raise WeightsCorrupt(f"more than the announced {self.size_bytes} bytes came")
            piece = data[: self.slices[self._index].size_bytes - self._in_slice]
            self._crc = crc32(piece, self._crc)
            self._in_slice += len(piece)
            data = data[len(piece) :]
            self._close_full_slices()

    def finish(self) -> None:
        """Close the file; raises `WeightsCorrupt` if bytes are missing, or `DiskFull`."""
        self._close_full_slices()
        if self._index < len(self.slices):
            raise WeightsCorrupt("the stream ended early", slice=self.slices[self._index].name)
        with full_disk_named(self.path):
            self._file.close()

    def discard(self) -> None:
        """Give the file up."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _close_full_slices(self) -> None:
        while self._index < len(self.slices) and self._in_slice == self.slices[self._index].size_bytes:
            part = self.slices[self._index]
            if self._crc != part.crc32:
                raise WeightsCorrupt(f"CRC of {part.name} differs", slice=part.name)
            self._index, self._in_slice, self._crc = self._index + 1, 0, 0
