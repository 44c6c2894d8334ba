# Mooncake is not installed where the checks run.
# pyright: reportMissingImports=false
"""KV blocks in a Mooncake store: memory that the workers of many hosts lend each other, found through one master.

A block has the header that it has on disk, so what comes back is what was stored, or a miss. What a worker lends goes
with it; the store evicts by itself what was not used for longest.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from urllib.parse import quote

from slipstream.engine.vllm.offload.blocks import HEADER, header_of, run_of, salt_digest

BUFFER_BYTES = 64 << 20
"""Of a client, for what is on its way."""
FAILED_PAUSE_S = 5.0
"""After the store refused a block nothing is written for this long."""


CONNECT_TIMEOUT_S = 5.0


def check_reachable(master: str) -> None:
    """Raise OSError if nobody listens there. Mooncake itself would try for minutes."""
    host, _, port = master.rpartition(":")
    with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S):
        pass


class MooncakeBlocks:
    """Blocks of one layout. All methods but `close` may be called from several threads."""

    def __init__(self, master: str, lent_bytes: int, host: str, layout: bytes) -> None:
        check_reachable(master)
        from mooncake.store import MooncakeDistributedStore

        self._layout = layout
        self._failed_until_s = 0.0
        self.rejected_files = self.failed_writes = 0
        self.read_bytes = self.written_bytes = 0
        self._store = MooncakeDistributedStore()
        code = self._store.setup(host, "P2PHANDSHAKE", lent_bytes, BUFFER_BYTES, "tcp", "", master)
        if code:
            raise RuntimeError(f"no Mooncake store: setup with the master at {master} answered {code}")

    def find(self, salt: str, keys: Sequence[bytes]) -> list[bool]:
        return [code == 1 for code in self._store.batch_is_exist([self._name(salt, key) for key in keys])]

    def write(self, salt: str, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Keep a block; False if it could not be."""
        if time.monotonic() < self._failed_until_s:
            self.failed_writes += 1
            return False
        header = header_of(self._layout, salt, key, parts)
        code = self._store.put_parts(self._name(salt, key), header, *parts)
        if code:
            self._failed_until_s = time.monotonic() + FAILED_PAUSE_S
            self.failed_writes += 1
            return False
        self.written_bytes += len(header) + sum(part.nbytes for part in parts)
        return True

    def read(self, salt: str, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill `parts` with a block. False: there is none, or none that can be trusted; `parts` hold anything then."""
        data = memoryview(self._store.get(self._name(salt, key)))
        if not data.nbytes:
            return False
        offset, whole = HEADER.size, data.nbytes == HEADER.size + sum(part.nbytes for part in parts)
        if whole:
            for part in parts:
                part.cast("B")[:] = data[offset : offset + part.nbytes]
                offset += part.nbytes
        if not whole or data[: HEADER.size] != header_of(self._layout, salt, key, parts):
            self.rejected_files += 1
            self._store.remove(self._name(salt, key))
            return False
        self.read_bytes += data.nbytes
        return True

    def end(self, salt: str) -> int:
        """Remove what is kept under a salt; returns how many blocks. Who reads one meanwhile has a miss."""
        return max(0, self._store.remove_by_regex(f"^{re.escape(self._prefix(salt))}.*", True))

    def close(self) -> None:
        self._store.close()

    def _prefix(self, salt: str) -> str:
        return f"slipstream/{quote(run_of(salt), safe='')}/{salt_digest(salt).hex()[:32]}/"

    def _name(self, salt: str, key: bytes) -> str:
        return f"{self._prefix(salt)}{self._layout.hex()[:16]}/{key.hex()}"
