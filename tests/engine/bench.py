"""An engine on the bench: requests for it, their answers put together, and the weights it serves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.common.errors import Unsupported
from slipstream.common.version import PolicyVersion
from slipstream.engine.base import (
    DecodeRequest,
    Engine,
    KvPayload,
    KvReference,
    PrefillRequest,
    PrefillResult,
    SampleChunk,
    Sampling,
)
from tests.engine.engines import FIRST, EngineUnderTest, Limits
from tests.engine.oracle import SIZES, Oracle, tensors

DEADLINE_S = 60.0
_numbers = itertools.count()


def unique(kind: str) -> str:
    """A name nobody else has: a salt is one, so that bodies that share an engine share no prefix."""
    return f"{kind}-{next(_numbers)}"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, SIZES.vocab_size, length).tolist()


def _salt_of(kv: KvPayload | KvReference) -> str:
    return kv.salt if isinstance(kv, KvReference) else kv.header.salt


class Finished:
    """All chunks of one sample, put together."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[PolicyVersion] = []
        self.oldest: set[PolicyVersion] = set()
        self.finish_reason = ""
        self.cached_token_count = 0
        self.chunk_count = 0

    def add(self, chunk: SampleChunk) -> None:
        assert not self.finish_reason, "a chunk after the last one"
        assert sum(count for count, _ in chunk.versions) == len(chunk.token_ids) == len(chunk.logprobs)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions += [version for count, version in chunk.versions for _ in range(count)]
        self.oldest.add(chunk.kv_oldest_version)
        self.finish_reason = chunk.finish_reason
        self.cached_token_count = chunk.cached_token_count
        self.chunk_count += 1


class Bench:
    """One engine, and the oracle of the weights it serves."""

    def __init__(self, kind: EngineUnderTest, engine: Engine, seed: int) -> None:
        self.kind = kind
        self.engine = engine
        self.version = FIRST
        self.seed = seed

    @property
    def block(self) -> int:
        return self.engine.limits.block_size_tokens

    @property
    def oracle(self) -> Oracle:
        return Oracle(self.seed)

    def between_steps(self) -> AbstractContextManager[None]:
        """Within it, what is in flight stays there, whatever else is done and however long it takes."""
        return self.kind.between_steps(self.engine)

    async def decoding(self, count: int, before: int = 0) -> None:
        """Return when so many tokens were sampled, `before` of them before."""
        await until(lambda: self.engine.load().decoded_tokens - before >= count, f"{count} tokens")

    async def serve(self, seed: int) -> PolicyVersion:
        """Update to the weights of a seed, as the next version."""
        version = PolicyVersion(self.version.incarnation, self.version.step + 1)
        await self.engine.update(version, tensors(seed), lambda paused: None)
        self.version, self.seed = version, seed
        return version

    def request(
        self,
        prompt: Sequence[int],
        samples: int = 1,
        salt: str | None = None,
        kv: KvPayload | KvReference | None = None,
        capture_routes: bool | None = None,
        first_route_position: int = 0,
        **sampling: Any,
    ) -> DecodeRequest:
        """A decode request of a name of its own, under a salt of its own unless told, or that of its KV."""
        name = unique("request")
        return DecodeRequest(
            name,
            list(prompt),
            (_salt_of(kv) if kv else unique("salt")) if salt is None else salt,
            tuple(f"{name}/{index}" for index in range(samples)),
            Sampling(**{"max_new_tokens": 8, "seed": 7, **sampling}),
            kv,
            self.engine.capabilities.captures_routes if capture_routes is None else capture_routes,
            first_route_position,
        )

    def prefill_request(self, prompt: Sequence[int], salt: str | None = None) -> PrefillRequest:
        salt = unique("salt") if salt is None else salt
        return PrefillRequest(unique("prefill"), list(prompt), salt, self.engine.capabilities.captures_routes)

    async def prefill(self, request: PrefillRequest) -> PrefillResult | None:
        """Compute a prompt for a decode engine; None where the engine serves in no prefill pool, and said so."""
        if self.engine.capabilities.prefills:
            return await self.engine.prefill(request)
        with pytest.raises(Unsupported) as refused:
            await self.engine.prefill(request)
        assert refused.value.metadata["capability"] == "prefills"
        return None

    async def run(self, request: DecodeRequest, flush_s: float = 1.0) -> list[Finished]:
        """Decode to the end."""
        samples = [Finished() for _ in request.sample_ids]
        async with asyncio.timeout(DEADLINE_S):
            async for chunk in self.engine.decode(request, flush_s):
                samples[chunk.sample_index].add(chunk)
        assert all(sample.finish_reason for sample in samples)
        return samples

    async def ask(self, prompt: Sequence[int], samples: int = 1, **options: Any) -> list[Finished]:
        return await self.run(self.request(prompt, samples, **options))

    async def greedy(self, prompt: Sequence[int], count: int = 8, **options: Any) -> list[int]:
        return (await self.ask(prompt, temperature=0.0, max_new_tokens=count, **options))[0].token_ids

    async def idle(self) -> None:
        """Return when no block is held and nothing waits; fail if that does not come."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                load = self.engine.load()
                if not (load.blocks_used or load.running_samples or load.waiting_requests or load.kv_transfers):
                    break
                await asyncio.sleep(0.005)
        self.kind.check(self.engine)

    def error_of(self, prompt: Sequence[int], sample: Finished, routes: np.ndarray | None, temperature: float) -> float:
        """The largest difference between the engine's log-probabilities of a sample and the oracle's."""
        tokens = [*prompt, *sample.token_ids]
        expected = self.oracle.forward(tokens, routes).logprobs(tokens, len(prompt), temperature)
        return float((torch.tensor(sample.logprobs) - expected).abs().max())


class Factory:
    """Builds engines for the bodies that need one of their own."""

    def __init__(self, kind: EngineUnderTest, model_dir: Path) -> None:
        self.kind = kind
        self.model_dir = model_dir

    @asynccontextmanager
    async def __call__(self, limits: Limits = Limits(), seed: int = 1) -> AsyncIterator[Bench]:  # noqa: B008 frozen
        """An engine whose first weights are those of `seed`."""
        engine = await self.kind.build(self.model_dir, limits, tensors(seed))
        try:
            yield Bench(self.kind, engine, seed)
        finally:
            await engine.stop()


async def until(condition, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for what no event announces."""
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110 counters have no event
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None
