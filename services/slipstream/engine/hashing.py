"""Salted hash chain over blocks of tokens: the key of the prefix cache, the same in engine, router and runner.

A block's hash covers the salt and every token up to the block's end, so equal hashes mean equal prefixes under equal
salts. Only full blocks have one. Golden values are in `tests/unit/engine/test_hashing.py`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol


class Prompted(Protocol):
    """A request with a prompt."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def salt(self) -> str: ...


def block_hashes(salt: str, token_ids: Sequence[int], block_size: int) -> list[int]:
    """Unsigned 64-bit hashes of the full blocks of `token_ids`, first to last.

    Each is BLAKE2b (8 bytes, read little-endian) of the parent's 8 bytes followed by the block's token ids as
    little-endian int32; the parent of the first block is the same hash of the salt's UTF-8 bytes.
    """
    parent = root(salt)
    layout = struct.Struct(f"<{block_size}i")
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = layout.pack(*token_ids[start : start + block_size])
        parent = chain(parent, block)
        hashes.append(int.from_bytes(parent, "little"))
    return hashes


def prompt_hash(salt: str, token_ids: Sequence[int]) -> int:
    """The hash of all of these tokens, those beyond the last full block too: a chain of one block."""
    block = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return int.from_bytes(chain(root(salt), block), "little")


def prompt_of(request: Prompted) -> int:
    """The hash of what there is KV of before a request's first token: all of its prompt but the last token."""
    return prompt_hash(request.salt, request.token_ids[:-1])


def root(salt: str) -> bytes:
    """What stands for the parent of a first block."""
    return hashlib.blake2b(salt.encode(), digest_size=8).digest()


def chain(parent: bytes, block: bytes) -> bytes:
    """The hash of a block after its parent."""
    return hashlib.blake2b(parent + block, digest_size=8).digest()
