"""The engine protocol: what prefill and decode workers need of an inference engine, and nothing of how it works.

Plain data and a `Protocol`; imports no torch. All methods are called from one event loop. Terms: a *request* is one
prompt; a *sample* is one continuation of it; `token_ids` of a request are its whole prompt. Log-probabilities are the
natural logarithm of softmax(logits / temperature), before top-k, top-p and min-p; greedy tokens have those of
temperature 1.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from slipstream.api.broadcast.v1.broadcast_pb2 import BorrowShardResponse
from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.routes import RouteRows, route_dtype
from slipstream.weights.manifest import Manifest
from slipstream.weights.straight.received import Received

FinishReason = Literal["", "stop", "length", "aborted"]

FRAMES = "frames"
"""The transport of KV that leaves an engine as bytes: `KvPayload`."""


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. Draws depend on `seed`, the sample's index and the position alone, never on the batch."""

    max_new_tokens: int
    """Most tokens to sample, the stop token included."""

    seed: int = 0
    """Any integer; taken modulo 2**63."""

    temperature: float = 1.0
    """0 is greedy."""

    top_p: float = 1.0
    """1 keeps all."""

    top_k: int = 0
    """0 keeps all."""

    min_p: float = 0.0
    """Keeps tokens at least this many times as likely as the likeliest; 0 keeps all."""

    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sample; the token belongs to it."""


@dataclass(frozen=True)
class PrefillRequest:
    """Compute the KV of `token_ids[:-1]`; the last prompt token is computed by decode, which samples from it."""

    request_id: str
    token_ids: Sequence[int]
    salt: str
    capture_routes: bool = True
    first_route_position: int = 0
    """Rows before it were recorded in earlier turns, and are not recorded again."""


@dataclass(frozen=True)
class KvReference:
    """KV that stays where it is until the connector of a decode engine takes it."""

    transport: str
    """Which connector: "nixl" or "mooncake"."""

    params: bytes
    """What the connector of the other engine needs: JSON, its own business."""

    transfer_id: str
    """Names it at the prefill engine."""

    token_count: int
    salt: str
    prompt_hash: int
    """As in `KvHeader`."""

    version: PolicyVersion
    oldest_version: PolicyVersion

    lease_s: float = 0.0
    """Seconds from now within which it may be taken, once; 0 before `Engine.lease_kv`."""

    address: str = ""
    """Of the prefill worker, to name it in errors."""


@dataclass(frozen=True)
class PrefillResult:
    """Where the prompt's KV is. `transfer_id` names it until it is released or expires."""

    transfer_id: str
    token_count: int
    """Positions with KV: the prompt's length less one."""

    cached_token_count: int
    """How many of them came from the prefix cache."""

    version: PolicyVersion
    """Weights that computed the rest."""

    kv_oldest_version: PolicyVersion
    """Oldest weights behind any of the positions."""

    reference: KvReference | None = None
    """What `Engine.lease_kv` will lease, where KV moves by a connector; else there is `Engine.export_kv`."""


@dataclass(frozen=True)
class KvHeader:
    """What the bytes of a KV payload mean: little-endian `dtype`, C order, `shape` as below."""

    dtype: str
    shape: tuple[int, ...]
    """`[layers, 2 (key, value), tokens, kv_heads, head_dim]`."""

    token_count: int
    salt: str
    prompt_hash: int
    """`hashing.prompt_hash` of the tokens that it was computed of, under that salt. Whoever computed it says both, and
    an engine takes nothing that is of another prompt, or would be found under another salt."""

    version: PolicyVersion
    oldest_version: PolicyVersion


@dataclass(frozen=True)
class KvPayload:
    """KV on its way from a prefill to a decode engine."""

    header: KvHeader
    data: bytes | bytearray | memoryview


@dataclass(frozen=True)
class DecodeRequest:
    """Sample `len(sample_ids)` continuations of one prompt.

    `kv` holds the KV of `token_ids[:-1]`; without it the engine computes what its prefix cache lacks.
    """

    request_id: str
    token_ids: Sequence[int]
    salt: str
    sample_ids: tuple[str, ...]
    sampling: Sampling
    kv: KvPayload | KvReference | None = None
    capture_routes: bool = True
    first_route_position: int = 0
    """As in `PrefillRequest`, for the rows of a prompt that is computed here."""
    for_training: bool = False
    """The policy gradient divides by these log-probabilities, so what biases them is refused (`check_unbiased`)."""
    sample_indexes: tuple[int, ...] = ()
    """What each sample draws with, where that is not its place in `sample_ids`."""

    @property
    def route_keys(self) -> tuple[str, ...]:
        """Where routes of its samples go."""
        return self.sample_ids if self.capture_routes else ()

    def draw_index(self, place: int) -> int:
        """The index that the sample at `place` draws with."""
        return self.sample_indexes[place] if self.sample_indexes else place


@dataclass
class SampleChunk:
    """Newly sampled tokens of one sample, in order."""

    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    """Run-length spans over `token_ids`: (count, weights that sampled them)."""

    kv_oldest_version: PolicyVersion = UNSET
    """Oldest weights behind any KV of this sample; the same in all its chunks, as later KV is never older."""

    finish_reason: FinishReason = ""
    """Set on the last chunk of a sample."""

    cached_token_count: int = 0
    """Prompt positions that were not computed here: found in this engine's prefix cache, or sent by another."""


@dataclass(frozen=True)
class UpdateReport:
    """What one weight update cost."""

    version: PolicyVersion
    previous_version: PolicyVersion | None
    pause_s: float
    """From the last step on old weights to the first that could run on new ones."""

    apply_s: float
    """The part of the pause spent copying weights."""

    in_flight_samples: int
    """Samples that crossed the update."""

    transfer_s: float = 0.0
    """Before the pause: bringing weights to where the engine copies them from."""

    size_bytes: int = 0
    """What was copied in the pause, where that is known."""


@dataclass(frozen=True)
class EngineLimits:
    """What fits. A request over a limit is refused, never truncated."""

    block_size_tokens: int
    block_count: int
    max_context_tokens: int
    max_running_samples: int
    max_waiting_requests: int
    kv_bytes_per_token: int
    moe_layers: int
    top_k: int
    expert_count: int
    """Of a layer."""
    vocab_size: int
    max_samples: int = 4096
    """Of one request."""
    max_stop_token_ids: int = 64

    @property
    def route_dtype(self) -> np.dtype[np.unsignedinteger]:
        return route_dtype(self.expert_count)

    @property
    def route_row_bytes(self) -> int:
        return self.moe_layers * self.top_k * self.route_dtype.itemsize


@dataclass(frozen=True)
class EngineCapabilities:
    """What this engine can do. Asked for anything else it raises `Unsupported`, whose `metadata` names the field."""

    captures_routes: bool = True
    """`capture_routes` of a request. A dense model has none to give; asking for them is no error."""

    prefills: bool = True
    """`prefill`; else its decode computes prompts itself, and it serves in no prefill pool."""

    kv_transports: tuple[str, ...] = (FRAMES,)
    """How KV gets out of `prefill` and into `decode`. "frames": `export_kv`, and a `KvPayload`; any other: a connector
    of the engine's own, and a `KvReference`. Empty: not at all."""

    keeps_kv_over_updates: bool = True
    """In-flight requests go on after `update` with the KV they have, and their prefixes stay in the cache."""

    truncates_sampling: bool = True
    """`top_k`, `top_p` and `min_p`."""

    chunked_prefill: bool = False
    """A prompt may be computed over several steps, so that running samples go on between."""

    preempts: bool = False
    """A running sample may lose its KV to others when blocks run out; it is computed once more, at the weights of then,
    and its routes say so (`RouteRows.recomputed_from`)."""

    kv_events: bool = True
    """`drain_kv_events`."""

    forgets_salts: bool = True
    """`end_salt` frees memory; else what was cached under the salt stays until it is evicted."""

    steps_in_group: bool = False
    """A rank that steps, pauses and swaps only together with the other ranks of its data-parallel group."""


@dataclass(frozen=True)
class BusyInterval:
    """A stretch of work, Unix seconds."""

    kind: Literal["prefill", "decode"]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class KvEvent:
    """A change of the prefix cache, for routers that place by prefix."""

    kind: Literal["stored", "removed", "cleared"]
    block_hashes: tuple[int, ...] = ()


@dataclass
class OffloadLoad:
    """KV outside of the engine's own pool. Bytes held are of now, the rest since start."""

    query_tokens: int = 0
    """Prompt tokens looked up beyond the engine's own prefix cache."""

    hit_tokens: int = 0
    """Those found."""

    memory_bytes: int = 0
    disk_bytes: int = 0
    """Of all users of the directory."""

    dead_bytes: int = 0
    """Held under salts that have ended."""

    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    store_read_bytes: int = 0
    """Of a store that hosts share."""

    store_written_bytes: int = 0
    rejected_blocks: int = 0
    """Blocks on disk or in a store that were not what their names say: misses."""

    failed_blocks: int = 0
    """Blocks that could not be written there."""


@dataclass(frozen=True)
class EngineLoad:
    """Counters of now (samples, requests, blocks) and since start (the rest)."""

    running_samples: int = 0
    waiting_requests: int = 0
    tokens_in_flight: int = 0
    """Tokens of the running samples, their prompts included."""
    blocks_used: int = 0
    """Held by requests, transfers or samples; cached blocks that nobody holds count as free."""

    blocks_total: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    route_bytes: int = 0
    preemptions: int = 0
    """Times that a sample lost its KV to others."""
    routes_dropped: int = 0
    """Rows given up because the byte bound was reached; they train as unknown routes."""

    kv_transfers: int = 0
    dead_kv_bytes: int = 0
    """KV that stays cached or held under salts that have ended."""

    offload: OffloadLoad | None = None
    """None: this engine offloads nothing."""


class PausedEngine(Protocol):
    """What `verify` sees of an engine between two steps, the new weights in place."""

    def parameters(self, wanted: Collection[str] = ()) -> Mapping[str, np.ndarray]:
        """The live parameters by Hugging Face name, as the engine will use them. Valid during the call only.

        Reading one may mean to fetch it, and then those that are `wanted` come together; the names are known at once.
        """
        ...

    def unchanged(self, names: Collection[str]) -> Collection[str]:
        """Those of the parameters that are in use just as they were given to `update`, as far as this is known.

        What was checked of them before the pause holds for them.
        """
        ...

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]` under the new weights, on KV of their own."""
        ...


@runtime_checkable
class JointVerify(Protocol):
    """A `verify` of several ranks that pause together or not at all; for engines with `steps_in_group`."""

    def __call__(self, engine: PausedEngine) -> None: ...

    def prepared(self) -> None:
        """Called when nothing stands in the way of a pause: for what can be done before it.

        Waits for the other ranks, raises if one is not ready.
        """
        ...

    def failed(self, error: Exception) -> None:
        """Called in the pause when this rank does not take the weights; does not raise."""
        ...


class Engine(Protocol):
    """One replica of the model. Errors are the classes of `common/errors.py`."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def version(self) -> PolicyVersion | None:
        """Weights of the next step; None until the first update."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors that `update` takes, by Hugging Face name. Known once the engine has started."""
        ...

    @property
    def silent_s(self) -> float:
        """0 while the engine moves; else for how long it has not, once that is longer than its `silence_s`.

        Then its streams have ended with `RequestAborted`. It moves again by itself, if ever.
        """
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Abort what runs and end the engine's thread."""
        ...

    async def prefill(self, request: PrefillRequest) -> PrefillResult: ...

    def check(self, request: DecodeRequest) -> None:
        """Raise what `decode` would raise at once."""
        ...

    def decode(self, request: DecodeRequest, flush_s: float = 1.0) -> AsyncGenerator[SampleChunk, None]:
        """Stream chunks: when a sample ends, when the version changes, and at least every `flush_s` seconds.

        Closing the iterator early aborts the request.
        """
        ...

    def decode_batches(self, request: DecodeRequest, flush_s: float = 1.0) -> AsyncGenerator[list[SampleChunk], None]:
        """Like `decode`, but chunks that are ready together come together: one message on the wire for each list."""
        ...

    async def abort(self, request_id: str) -> int:
        """End a request in whatever phase; returns the samples ended, once their blocks are free. Unknown ids: 0."""
        ...

    def export_kv(self, transfer_id: str) -> KvPayload:
        """The KV of a prefill, as many times as wanted until `release_kv` or expiry."""
        ...

    def lease_kv(self, transfer_id: str) -> KvReference:
        """Promise a prefill's KV to one taker, who may read it by the connector for `lease_s`. A second one is refused.

        So nothing is read that was freed meanwhile: neither twice, nor after expiry, nor of another epoch.
        """
        ...

    def release_kv(self, transfer_id: str) -> bool:
        """Free a prefill's KV; False if there is none of that id."""
        ...

    def routes(self, key: str) -> RouteRows:
        """What was recorded under a request id (rows computed at prefill) or a sample id (rows computed at decode)."""
        ...

    def release_routes(self, key: str) -> bool: ...

    async def update(
        self, version: PolicyVersion, tensors: Any, verify: Callable[[PausedEngine], None]
    ) -> UpdateReport:
        """Swap weights between two steps: pause, keep KV, apply, verify, resume; on any exception, roll back and raise.

        `tensors`: what `receive` gave, of an engine that is a `ReceivingEngine`. Else they are
        complete and finite, by Hugging Face name (torch or numpy); else `WeightsCorrupt`, before a pause.
        `verify` is called while paused, on the engine's thread, and raises to reject the update; so no token is ever
        sampled by weights that were not verified.
        """
        ...

    async def checksums(self, reduce: Callable[[str, np.ndarray], int]) -> dict[str, int]:
        """`reduce(name, array)` of every live parameter, between two steps."""
        ...

    async def probe(self, token_ids: Sequence[int], salt: str) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, computed whole, the prefix cache neither read nor written."""
        ...

    def end_salt(self, salt: str) -> None:
        """The last group of this salt ended: forget its prefixes, those still in use once they no longer are."""
        ...

    def load(self) -> EngineLoad: ...

    def drain_busy(self) -> list[BusyInterval]:
        """Intervals of work finished since the last call; shorter gaps than 20 ms are bridged."""
        ...

    def drain_kv_events(self) -> list[KvEvent]: ...


@runtime_checkable
class ReceivingEngine(Protocol):
    """An engine that reads weights by itself, in the process that computes."""

    async def check_room(self, transport: str) -> None:
        """Raise `ConfigError` unless there is memory for what `receive` takes; nothing is reserved."""
        ...

    async def receive(
        self, manifest: Manifest, loans: Sequence[BorrowShardResponse], reader: str, deadline_s: float
    ) -> Received:
        """As `weights/straight/transport.py: Receive`: to where `update` takes them, while steps go on."""
        ...


async def each_chunk(batches: AsyncGenerator[list[SampleChunk], None]) -> AsyncGenerator[SampleChunk, None]:
    """The chunks of `Engine.decode_batches` one by one, as `Engine.decode` gives them."""
    async with aclosing(batches):
        async for chunks in batches:
            for chunk in chunks:
                yield chunk
