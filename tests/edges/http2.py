"""A client that speaks just enough HTTP/2 to call, and grants no window: nothing it is answered can be delivered."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_BYTES = 16_384


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def header_block(fields: Sequence[tuple[str, str]]) -> bytes:
    """HPACK without a table: every field spelt out."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, out = len(data) - 127, bytearray([127])
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest]) + data


class SilentClient:
    """One connection. It answers pings, so that it counts as alive, and reads nothing else."""

    def __init__(self, address: str, token: str | None) -> None:
        host, _, port = address.rpartition(":")
        self._authority = address
        self._token = token
        self._next_stream = 1
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.settimeout(None)
        self._lock = threading.Lock()
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)
        self._send(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._thread = threading.Thread(target=self._answer_pings, daemon=True)
        self._thread.start()

    def call(self, path: str, body: bytes, *, end: bool = True, timeout: str | None = None) -> None:
        """Send one request of less than 64 KiB, all windows together; `timeout` in gRPC's spelling."""
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        if self._token is not None:
            fields.append(("authorization", f"Bearer {self._token}"))
        if timeout is not None:
            fields.append(("grpc-timeout", timeout))
        message = b"\x00" + len(body).to_bytes(4, "big") + body
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        frames = frame(HEADERS, END_HEADERS, stream, header_block(fields))
        for at in range(0, len(message), MAX_FRAME_BYTES):
            last = END_STREAM if end and at + MAX_FRAME_BYTES >= len(message) else 0
            frames += frame(DATA, last, stream, message[at : at + MAX_FRAME_BYTES])
        self._send(frames)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)
        self._socket.close()

    def _send(self, data: bytes) -> None:
        with self._lock:
            self._socket.sendall(data)

    def _answer_pings(self) -> None:
        while head := self._read(9):
            body = self._read(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            with suppress(OSError):
                if kind == PING and not flags & ACK:
                    self._send(frame(PING, ACK, 0, body))
                elif kind == SETTINGS and not flags & ACK:
                    self._send(frame(SETTINGS, ACK, 0, b""))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                more = self._socket.recv(count - len(data))
            except OSError:
                more = b""
            if not more:
                return b""
            data += more
        return data
