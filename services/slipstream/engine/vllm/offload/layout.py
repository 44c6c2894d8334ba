"""What the bytes of an offloaded block mean. KV of another layout is never read as this one's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

FORMAT = 1


@dataclass(frozen=True)
class Layout:
    """Everything that the bytes depend on but weights and tokens: those are in the block's hash and its salt."""

    model: str
    """Digest of the model's `config.json`."""

    engine: str
    """Name and version of what wrote the block."""

    dtype: str
    """Of the KV cache."""

    block_size_tokens: int
    kv_bytes: int
    """Of one block, all ranks together, one after the other."""

    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    kv_cache_layout: str
    layers: tuple[str, ...]
    route_bytes: int
    """Expert routes that follow the KV; 0: none."""

    hash_algorithm: str
    """Of block hashes."""

    @property
    def digest(self) -> bytes:
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).digest()
