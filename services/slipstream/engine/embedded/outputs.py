"""What a step of the engine hands out: routes, finished prefills, and news of samples."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.common.errors import RequestAborted
from slipstream.engine.base import PrefillResult, SampleChunk
from slipstream.engine.routes import RouteRows


@dataclass(frozen=True)
class Recorded:
    """Output: expert routes, for whoever asks by this key."""

    key: str
    routes: RouteRows
    prompt: int | None = None
    """The hash of the prompt that they are of, if they are of one."""


@dataclass(frozen=True)
class Transfer:
    """A prefill's KV, held for whoever fetches it."""

    result: PrefillResult
    blocks: list[int]


@dataclass(frozen=True)
class PrefillDone:
    """Output: a prefill succeeded, or was aborted."""

    request_id: str
    outcome: Transfer | RequestAborted


@dataclass(frozen=True)
class Chunks:
    """Output: news of a decode request's samples. `ended`: nothing follows."""

    request_id: str
    chunks: list[SampleChunk]
    ended: bool = False


Output = Recorded | PrefillDone | Chunks
