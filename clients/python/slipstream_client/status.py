"""google.rpc.Status with one google.rpc.ErrorInfo, read and written by hand.

The generated classes are in googleapis-common-protos, which a client need not install for four fields:

    Status    {int32 code = 1; string message = 2; repeated Any details = 3}
    Any       {string type_url = 1; bytes value = 2}
    ErrorInfo {string reason = 1; string domain = 2; map<string, string> metadata = 3}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

STATUS_KEY = "grpc-status-details-bin"
DOMAIN = "slipstream"
_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def error_info(status: bytes) -> tuple[str, dict[str, str]] | None:
    """Reason and metadata of the first ErrorInfo of our domain, or None; bytes of anything else count as none."""
    try:
        details = [dict(_fields(detail)) for number, detail in _fields(status) if number == 3]
        for detail in details:
            if detail.get(1, b"").decode() == _ERROR_INFO:
                fields = list(_fields(detail.get(2, b"")))
                named = {number: value.decode() for number, value in fields if number in (1, 2)}
                if named.get(2) == DOMAIN:
                    entries = [dict(_fields(entry)) for number, entry in fields if number == 3]
                    metadata = {entry.get(1, b"").decode(): entry.get(2, b"").decode() for entry in entries}
                    return named.get(1, ""), metadata
    except (ValueError, IndexError):
        return None
    return None


def status_bytes(code: int, message: str, reason: str, metadata: Mapping[str, str]) -> bytes:
    """A serialized Status with one ErrorInfo: what a server sends as `grpc-status-details-bin`."""
    entries = [_field(3, _field(1, key.encode()) + _field(2, value.encode())) for key, value in metadata.items()]
    info = _field(1, reason.encode()) + _field(2, DOMAIN.encode()) + b"".join(entries)
    detail = _field(1, _ERROR_INFO.encode()) + _field(2, info)
    return b"\x08" + _varint(code) + _field(2, message.encode()) + _field(3, detail)


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a message; others are skipped."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, position = _read_varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            size, position = _read_varint(data, position)
            if position + size > len(data):
                raise ValueError("a field ends beyond its message")
            yield number, data[position : position + size]
            position += size
        else:
            raise ValueError(f"wire type {kind}")


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
