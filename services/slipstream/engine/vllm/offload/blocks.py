"""What stands before an offloaded block wherever it is kept, so that no other bytes are taken for it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

MAGIC = b"SLIPKV\x00\x01"
HEADER = struct.Struct("<8sQ32s32s64s32s")
"""Magic, bytes that follow, layout, salt, key (padded), checksum of all of these and what follows."""


def salt_digest(salt: str) -> bytes:
    return hashlib.sha256(salt.encode()).digest()


def run_of(salt: str) -> str:
    """The run that a salt belongs to: its first part."""
    return salt.partition("/")[0]


def header_of(layout: bytes, salt: str, key: bytes, parts: Sequence[memoryview]) -> bytes:
    size = sum(part.nbytes for part in parts)
    fields = (MAGIC, size, layout, salt_digest(salt), key)
    digest = hashlib.blake2b(HEADER.pack(*fields, b""), digest_size=32)
    for part in parts:
        digest.update(part)
    return HEADER.pack(*fields, digest.digest())
