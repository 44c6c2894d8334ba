"""Samples on their way out of vLLM: tokens as they come, cut into chunks at the versions that sampled them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.common.version import UNSET, PolicyVersion
from slipstream.engine.base import DecodeRequest, FinishReason, SampleChunk

SEED_BITS = 63
GREEDY_BELOW = 1e-5
"""Temperatures that vLLM's sampler takes for 0."""


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one sample's own generator."""
    digest = hashlib.blake2b(f"{seed % 2**63}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


@dataclass
class Sample:
    """One continuation. Positions count its own tokens from 0."""

    index: int
    spans: list[tuple[int, PolicyVersion]]
    """(first position, weights that sample from there on)."""
    greedy: bool = False
    """Whether vLLM takes its temperature for 0, and tells log-probabilities of 1: all lies on the likeliest token."""
    vllm_id: str = ""
    """Set once vLLM has it."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    cached_token_count: int = 0
    kv_oldest: PolicyVersion = UNSET
    finish_reason: FinishReason = ""
    taken: int = 0
    aborted: bool = False
    """Whether its end was asked for."""
    task: asyncio.Task[None] | None = None
    """Takes its tokens out of vLLM."""
    ended: bool = False
    """Its last chunk is out."""

    def swapped(self, sampled_count: int | None, version: PolicyVersion) -> None:
        """Weights changed after `sampled_count` tokens; None: before its prompt was touched."""
        if sampled_count is None:
            self.spans = [(0, version)]
        else:
            self.spans.append((sampled_count, version))

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """What vLLM sampled next."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(logprobs) if self.greedy else logprobs

    def take(self) -> SampleChunk | None:
        """What came since the last chunk, if anything."""
        if self.ended or (self.taken == len(self.token_ids) and not self.finish_reason):
            return None
        start, end = self.taken, len(self.token_ids)
        self.taken, self.ended = end, bool(self.finish_reason)
        return SampleChunk(
            self.index,
            self.token_ids[start:end],
            self.logprobs[start:end],
            self._versions(start, end),
            self.kv_oldest,
            self.finish_reason,
            self.cached_token_count,
        )

    def _versions(self, start: int, end: int) -> list[tuple[int, PolicyVersion]]:
        bounds = [first for first, _ in self.spans[1:]] + [end]
        runs: list[tuple[int, PolicyVersion]] = []
        for (first, version), after in zip(self.spans, bounds, strict=True):
            count = min(after, end) - max(first, start)
            if count > 0:
                runs.append((count, version))
        return runs


class OpenRequest:
    """A decode request and its samples, from its call to its last chunk."""

    def __init__(
        self,
        request: DecodeRequest,
        version: PolicyVersion,
        flush_s: float,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        self.request = request
        self.transfer = transfer
        """What the connector is told of KV from elsewhere."""
        greedy = 0 < request.sampling.temperature < GREEDY_BELOW
        self.samples = [Sample(index, [(0, version)], greedy) for index in range(len(request.sample_ids))]
        self.error: Exception | None = None
        self.counted = False
        """Whether the counters have its prompt."""
        self.prompt_ready = asyncio.Event()
        """Its KV is here, or will never be: with KV from elsewhere, the samples but the first wait for it."""
        self._flush_s = flush_s
        self._flush_now = False
        self._news = asyncio.Event()

    def begin(self, sample: Sample, salt_oldest: PolicyVersion) -> None:
        """A sample's first token comes: say what its KV rests on. `salt_oldest`: of any KV that it may have found.

        Rows of the prompt are kept once, of the sample that ends first. Where weights changed between the beginnings of
        two samples, those rows may be of the older weights, and replayed they are to the other one what older KV is.
        """
        first = sample.spans[0][1]
        found = [salt_oldest] if sample.cached_token_count else []
        begun = [other.spans[0][1] for other in self.samples if other.token_ids and self.request.capture_routes]
        sample.kv_oldest = min([first, *found, *begun])

    @property
    def waiting(self) -> bool:
        """Whether none of its samples has a token yet."""
        return not any(sample.token_ids or sample.finish_reason for sample in self.samples)

    @property
    def token_count(self) -> int:
        """Tokens of its running samples, their prompts included."""
        prompt = len(self.request.token_ids)
        return sum(prompt + len(sample.token_ids) for sample in self.unfinished if sample.token_ids)

    @property
    def unfinished(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.finish_reason]

    def wake(self, flush: bool) -> None:
        """There is something to look at; `flush`: also at samples that go on."""
        self._flush_now |= flush
        self._news.set()

    async def next_chunks(self) -> list[SampleChunk]:
        """Wait for a sample's end, for the flush interval, or for a change of version. Empty: all are out."""
        flush_at_s = time.monotonic() + self._flush_s
        while not all(sample.ended for sample in self.samples):
            if self.error is not None:
                raise self.error
            flush = self._flush_now or time.monotonic() >= flush_at_s
            ready = [sample for sample in self.samples if flush or sample.finish_reason]
            chunks = [chunk for sample in ready if (chunk := sample.take()) is not None]
            if flush:
                self._flush_now = False
                flush_at_s = time.monotonic() + self._flush_s
            if chunks:
                return chunks
            self._news.clear()
            try:
                async with asyncio.timeout(max(flush_at_s - time.monotonic(), 0.001)):
                    await self._news.wait()
            except TimeoutError:
                continue
        return []
