"""Records as lines of the journal's file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

PORTION = 64
"""Members of a large field that are written out together: what one call does lets no other thread go on."""


def line_of(record: Mapping[str, Any]) -> bytes:
    """One record, with its checksum."""
    return _line(json.dumps(record, separators=(",", ":")).encode())


def large_line_of(record: Mapping[str, Any]) -> bytes:
    """The same bytes for a record of many megabytes, for a thread: others go on meanwhile."""
    return _line("".join(_portions(record)).encode())


def _line(body: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _portions(record: Mapping[str, Any]) -> Iterator[str]:
    for index, (name, value) in enumerate(record.items()):
        yield f"{',' if index else '{'}{_text(name)}:"
        yield from _value(value)
    yield "}" if record else "{}"


def _value(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list) and len(value) > PORTION:
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        members: list[Any] = list(value.items()) if isinstance(value, dict) else value
        for start in range(0, len(members), PORTION):
            portion = members[start : start + PORTION]
            text = _text(dict(portion) if isinstance(value, dict) else portion)
            yield f"{',' if start else opening}{text[1:-1]}"
        yield closing
    else:
        yield _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
