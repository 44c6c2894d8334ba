"""Files of JSON objects, compressed: zstandard frames one after the other, each of whole lines. `zstdcat` shows them.

Such a file needs no end: whoever reads one that is still written gets every frame that is whole. What a crash of the
machine left half-written is skipped up to the next frame.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

SUFFIX = ".jsonl.zst"
LEVEL = 3
_MAGIC = b"\x28\xb5\x2f\xfd"
_WINDOW_BYTES = 1 << 17


def encode_line(record: dict[str, Any]) -> bytes:
    """One record as a line."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def encode_frame(lines: Sequence[bytes]) -> bytes:
    """A frame of whole lines, with a checksum."""
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(b"".join(lines))


def read_compressed(path: Path, on_damage: Callable[[int], None] = lambda size: None) -> Iterator[dict[str, Any]]:
    """Records of a file, in order; none if it is missing. Frames and lines that are damaged are left out.

    `on_damage` is told the bytes of each place that holds no whole frame.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for data in _frames(file, on_damage):
            for line in data.splitlines():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record


def _frames(file: BinaryIO, on_damage: Callable[[int], None]) -> Iterator[bytes]:
    size = file.seek(0, SEEK_END)  # what comes later is none of it: somebody may be writing
    offset = read_to = 0
    while (start := _next_frame(file, offset)) is not None:
        data, length = _frame(file, start)
        offset = start + length
        if data is not None:
            if start > read_to:
                on_damage(start - read_to)
            read_to = offset
            yield data
    if size > read_to:
        on_damage(size - read_to)


def _frame(file: BinaryIO, start: int) -> tuple[bytes | None, int]:
    """The content of the frame at an offset, and its length; None and a few bytes to go on after, if it is none."""
    window_bytes = _WINDOW_BYTES
    while True:
        file.seek(start)
        window = file.read(window_bytes)
        decoder = zstandard.ZstdDecompressor().decompressobj()
        try:
            data = decoder.decompress(window)
        except zstandard.ZstdError:
            return None, len(_MAGIC)
        if decoder.eof:
            return data, len(window) - len(decoder.unused_data)
        if len(window) < window_bytes:  # half-written, or torn
            return None, len(_MAGIC)
        window_bytes *= 2


def _next_frame(file: BinaryIO, offset: int) -> int | None:
    """Where the first frame from an offset on begins."""
    while True:
        file.seek(offset)
        window = file.read(_WINDOW_BYTES)
        found = window.find(_MAGIC)
        if found >= 0:
            return offset + found
        if len(window) < _WINDOW_BYTES:
            return None
        offset += len(window) - len(_MAGIC) + 1
